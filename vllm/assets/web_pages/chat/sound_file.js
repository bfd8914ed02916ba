// Sounds of the user: files and recordings of the microphone, as WAV of one channel.

const Sound = {
  RATE: 16000, // samples per second, which models read

  // {kind, label, url} of a file. Throws an Error that names the file.
  async read(file) {
    let sound;
    try {
      // An offline context decodes to its own rate, and needs no permission to play.
      sound = await new OfflineAudioContext(1, 1, Sound.RATE).decodeAudioData(await file.arrayBuffer());
    } catch {
      throw new Error(`${file.name} cannot be read as a sound by this browser.`);
    }
    const samples = new Float32Array(sound.length), channels = sound.numberOfChannels;
    for (let c = 0; c < channels; c += 1) {
      sound.getChannelData(c).forEach((value, i) => { samples[i] += value / channels; });
    }
    return {kind: "audio", label: `${file.name}, ${seconds(sound.duration)}`, url: await dataUrl(Sound.wav(samples))};
  },

  // A file of samples from -1 to 1.
  wav(samples) {
    const bytes = new DataView(new ArrayBuffer(44 + 2 * samples.length));
    const text = (at, value) => [...value].forEach((letter, i) => bytes.setUint8(at + i, letter.charCodeAt(0)));
    text(0, "RIFF");
    bytes.setUint32(4, 36 + 2 * samples.length, true);
    text(8, "WAVEfmt ");
    bytes.setUint32(16, 16, true);
    bytes.setUint16(20, 1, true); // integers
    bytes.setUint16(22, 1, true); // channels
    bytes.setUint32(24, Sound.RATE, true);
    bytes.setUint32(28, 2 * Sound.RATE, true);
    bytes.setUint16(32, 2, true);
    bytes.setUint16(34, 16, true);
    text(36, "data");
    bytes.setUint32(40, 2 * samples.length, true);
    samples.forEach((value, i) => bytes.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, value)) * 0x7fff, true));
    return new Blob([bytes], {type: "audio/wav"});
  },
};

// The button that records until it is pressed again: onFile(file) gets the recording.
class Recorder {
  constructor(button, onFile, onProblem) {
    this.button = button;
    this.onFile = onFile;
    this.onProblem = onProblem;
    this.recorder = null;
    button.addEventListener("click", () => this.recorder ? this.recorder.stop() : this.start());
  }

  async start() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({audio: true});
    } catch (error) {
      this.onProblem(`The microphone cannot be used: ${error.message}.`);
      return;
    }
    const parts = [], recorder = this.recorder = new MediaRecorder(stream);
    recorder.ondataavailable = (event) => parts.push(event.data);
    recorder.onstop = () => {
      for (const track of stream.getTracks()) track.stop();
      this.show(null);
      this.onFile(new File(parts, "recording", {type: recorder.mimeType || "audio/webm"}));
    };
    recorder.start();
    this.show(recorder);
  }

  show(recorder) {
    this.recorder = recorder;
    this.button.textContent = recorder ? "Stop recording" : "Record";
    this.button.ariaPressed = String(Boolean(recorder));
  }
}
