"""Test images in conversations: all ways to give an image result in the same tokens and outputs."""

import base64
import json

import pytest

from vllm import LLM, SamplingParams

tiny_images = pytest.importorskip("tests.tiny_images")
pillow = pytest.importorskip("PIL.Image")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTION = {"type": "text", "text": "what <image> is it?"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}: "
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}"
    "{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ p.text + ' ' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a LLaVA whose chat template is in the file of its processor."""
    made = tiny_images.make_tiny_images("llava", tmp_path_factory.mktemp("llava"))
    (made / "chat_template.jinja").unlink(missing_ok=True)
    (made / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    for seed in (1, 2):
        pillow.fromarray(tiny_images.draw_image(seed)).save(made / f"{seed}.png")
    return made


def user(*parts):
    return [{"role": "user", "content": [*parts, QUESTION]}]


def test_every_way_to_give_an_image_is_the_same(folder):
    pixels = [tiny_images.draw_image(seed) for seed in (1, 2)]
    data = base64.b64encode((folder / "1.png").read_bytes()).decode()
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=80,
        allowed_local_media_path=str(folder),
    )
    ways = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image_pil", "image_pil": pillow.open(folder / "1.png")},
        {"type": "image", "path": str(folder / "1.png")},
        {"type": "image", "image": pixels[0]},
    ]
    second = {"type": "image", "url": (folder / "2.png").as_uri()}
    *same, both, neither = llm.chat(
        [user(way) for way in ways] + [user(ways[0], second), user()], GREEDY
    )
    prompts = [
        (list(each.prompt_token_ids), images)
        for each, images in ((same[0], pixels[:1]), (both, pixels), (neither, []))
    ]
    expected = tiny_images.expected_outputs(folder, prompts, GREEDY.max_tokens)
    assert [list(each.outputs[0].token_ids) for each in (same[0], both, neither)] == expected
    for each in same:
        assert each.prompt_token_ids == same[0].prompt_token_ids
        assert each.outputs[0].token_ids == same[0].outputs[0].token_ids
    image = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    counts = [list(each.prompt_token_ids).count(image) for each in (neither, same[0], both)]
    assert counts == [0, 16, 32], "the text of the user is no image"
