"""Draw an image and ask a model about it, with the `openai` client.

The server needs a model that reads images: vllm serve llava-hf/llava-1.5-7b-hf
"""

import argparse
import base64
import io

from openai import OpenAI
from PIL import Image, ImageDraw


def draw() -> bytes:
    """Return a PNG of a red circle above a blue square."""
    image = Image.new("RGB", (320, 240), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((110, 10, 210, 110), fill="red")
    pen.rectangle((110, 130, 210, 230), fill="blue")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--message", default="What is in this picture?")
    parser.add_argument("--image", help="URL of an image; default: a drawing of this program")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    url = args.image or "data:image/png;base64," + base64.b64encode(draw()).decode()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": args.message},
                ],
            }
        ],
        max_tokens=64,
        temperature=0,
    )
    print(answer.choices[0].message.content)
    if answer.usage is not None:
        print(f"{answer.usage.prompt_tokens} tokens, those of the image included")


if __name__ == "__main__":
    main()
