// Pictures of the user's files, as data: URLs of a size that a model makes use of.

const Picture = {
  MAX_SIDE: 2048, // pixels; models scale larger pictures down themselves
  MAX_BYTES: 2 * 2 ** 20, // of a file that is sent without a change
  PLAIN_TYPES: ["image/png", "image/jpeg", "image/webp", "image/gif"], // all servers read them
  QUALITY: 0.9,

  // {kind, label, url} of a file. Throws an Error that names the file.
  async read(file) {
    let bitmap;
    try {
      bitmap = await createImageBitmap(file);
    } catch {
      throw new Error(`${file.name} cannot be read as a picture by this browser.`);
    }
    const {width, height} = bitmap, scale = Math.min(1, Picture.MAX_SIDE / Math.max(width, height));
    const isPlain = Picture.PLAIN_TYPES.includes(file.type) && file.size <= Picture.MAX_BYTES;
    const blob = scale === 1 && isPlain ? file : await Picture.draw(bitmap, scale);
    bitmap.close();
    const size = (factor) => `${Math.max(1, Math.round(width * factor))} × ${Math.max(1, Math.round(height * factor))}`;
    const scaled = scale === 1 ? "" : `, scaled down from ${size(1)}`;
    return {kind: "image", label: `${file.name || "picture"}, ${size(scale)}${scaled}`, url: await dataUrl(blob)};
  },

  // JPEG has no transparency; the server would put white behind a picture as well.
  async draw(bitmap, scale) {
    const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", Picture.QUALITY));
  },
};

// The content of a Blob as a data: URL.
function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
