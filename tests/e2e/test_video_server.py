"""Test videos and sounds over HTTP with the official client, for a model that does not read
sound.
"""

import base64
import json

import openai
import pytest

from tests.e2e.server import start_server
from tests.tiny_images import make_tiny_images
from tests.tiny_videos import make_video
from vllm.transformers_utils.transformers_version import is_version_4

pytest.importorskip("PIL", reason="images need Pillow")
pytest.importorskip("av", reason="videos need PyAV")
pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers spells the positions of videos in another way"
)

TEXT = {"type": "text", "text": "What is it?"}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
REFUSED = 'must have the type "text" or "image_url" or "video_url", as this model reads text and'


def video_part(file, **fields):
    data = base64.b64encode(file).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}, **fields}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = make_tiny_images("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    flags = ["--dtype", "float32", "--max-model-len", "384", "--num-gpu-blocks-override", "100"]
    choice = json.dumps({"video": {"num_frames": 4, "fps": 2}})
    with start_server(
        *("--model", str(folder), "--served-model-name", "film"),
        *flags,
        "--media-io-kwargs",
        choice,
    ) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client, *parts):
    return client.chat.completions.create(
        model="film",
        messages=[{"role": "user", "content": [*parts, TEXT]}],
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )


def test_a_video_of_a_client_is_read(client):
    film = make_video("mp4", range(0, 200, 10))
    answer = ask(client, video_part(film))
    none, short = ask(client), ask(client, video_part(make_video("mp4", [200])))
    # 2 seconds with 2 frames each make 2 pairs; a single frame also becomes a pair.
    pads = [each.usage.prompt_tokens - none.usage.prompt_tokens - 2 for each in (answer, short)]
    assert pads[0] == 2 * pads[1] > 0
    again = ask(client, video_part(film, uuid="film-1"))
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert short.choices[0].message.content != answer.choices[0].message.content


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (video_part(make_video("mp4")[:-200]), "messages[0].content[0]: this MP4 file"),
        (video_part(b"GIF89a"), "messages[0].content[0]: this GIF file cannot be decoded"),
        (video_part(b"text"), "it must be a video of MP4 and MOV, WebM and MKV, AVI, GIF"),
        ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "cannot fetch"),
        (SOUND, REFUSED),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(client, part, message):
    with pytest.raises(openai.BadRequestError) as failure:
        ask(client, part)
    assert message in failure.value.message


def test_responses_refuse_sound_for_a_model_that_reads_none(client):
    with pytest.raises(openai.BadRequestError) as failure:
        client.responses.create(model="film", input=[{"role": "user", "content": [SOUND]}])
    assert f"input[0].content[0] {REFUSED}" in failure.value.message
