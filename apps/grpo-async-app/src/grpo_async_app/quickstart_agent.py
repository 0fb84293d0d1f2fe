"""Answers a product, with a calculator where the model asks for one: knows OpenAI's interface and nothing else.

It reads a row such as {"prompt": "473*856="} and prints the answer.
"""

import json
import re
import sys

from openai import OpenAI


def main() -> None:
    """Answer one row."""
    client = OpenAI()  # of OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
    said = ""
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        said = answer.choices[0].message.content or ""
        call = re.search(r"\[(\d+)\*(\d+)\]", said)
        if call is None:
            break
        product = str(int(call[1]) * int(call[2]))
        messages += [
            {"role": "assistant", "content": said},
            {"role": "tool", "tool_call_id": "calculator", "content": product},
        ]
    print(said)


if __name__ == "__main__":
    main()
