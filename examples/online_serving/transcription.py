"""Send sound to a server and print what it writes down, with the `openai` client.

Without --file it is a melody that this program makes, of which a model may write anything.
The server needs a model that transcribes: vllm serve openai/whisper-large-v3-turbo
"""

import argparse
import array
import io
import math
import wave
from pathlib import Path

from openai import OpenAI

RATE = 16_000
NOTES = (262, 294, 330, 349, 392, 392)
NOTE_S = 0.5


def make_melody() -> bytes:
    """Return a WAV file with a short pause after each note."""
    samples = array.array("h")
    for note in NOTES:
        for i in range(int(NOTE_S * RATE)):
            loudness = 8000 * max(0.0, 1 - i / (0.8 * NOTE_S * RATE))
            samples.append(int(loudness * math.sin(2 * math.pi * note * i / RATE)))
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--file", type=Path, help="recording; default: the melody")
    parser.add_argument("--language", help="that is spoken, such as en; default: is detected")
    args = parser.parse_args()
    with OpenAI(base_url=args.url, api_key=args.api_key) as client:
        write_down(client, args.file, args.language)


def write_down(client: OpenAI, file: Path | None, language: str | None) -> None:
    """Print the text of a recording as it is written, then in English, then with its times."""
    model = client.models.list().data[0].id
    sound = ("melody.wav", make_melody()) if file is None else file
    spoken = {"language": language} if language else {}

    print("transcription: ", end="")
    for event in client.audio.transcriptions.create(model=model, file=sound, stream=True, **spoken):
        if event.type == "transcript.text.delta":
            print(event.delta, end="", flush=True)
    print()

    translation = client.audio.translations.create(model=model, file=sound)
    print(f"translation: {translation.text}")

    subtitles = client.audio.transcriptions.create(
        model=model, file=sound, response_format="vtt", **spoken
    )
    print(subtitles)


if __name__ == "__main__":
    main()
