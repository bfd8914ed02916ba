"""Send a prompt as embeddings: the server needs --enable-prompt-embeds.

Embeddings come from transformers here, which reads the same model as the server. What they stand
for need not be text: soft prompts, or what another model has seen.
"""

import argparse
import base64
import io

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="folder or name of the model; default: the server's")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.api_key)
    served = client.models.list().data[0]
    name = args.model or served.model_dump()["root"]

    tokenizer = AutoTokenizer.from_pretrained(name)
    embedding = AutoModelForCausalLM.from_pretrained(name).get_input_embeddings()
    prompt = "def read_file(path):\n"
    with torch.inference_mode():
        embeds = embedding(tokenizer(prompt, return_tensors="pt").input_ids)[0]
    file = io.BytesIO()
    torch.save(embeds, file)
    print(f"{len(embeds)} embeddings of {embeds.shape[1]} numbers")

    completion = client.completions.create(
        model=served.id,
        prompt=prompt,
        max_tokens=24,
        temperature=0,
        extra_body={"prompt_embeds": base64.b64encode(file.getvalue()).decode()},
    )
    of_embeddings, of_text = completion.choices  # embeddings come first
    print(of_embeddings.text)
    print("the same as of the text:", of_embeddings.text == of_text.text)


if __name__ == "__main__":
    main()
