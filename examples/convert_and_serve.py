"""Pack a checkpoint and let vLLM answer: python examples/convert_and_serve.py CHECKPOINT PACKED.

In a shell: qat-core convert CHECKPOINT PACKED && qat-core verify PACKED && vllm serve PACKED
Without a GPU set VLLM_CPU_KVCACHE_SPACE=1, in GiB: vLLM asks for nearly all memory otherwise. Its
server is another command there: docs/engines.md.
"""

import sys

from qat_core import Recipe, convert, verify


def main() -> None:
    """A function, as vLLM starts a process that imports this file."""
    from vllm import LLM, SamplingParams

    source, packed = sys.argv[1:]
    print(convert(source, packed, Recipe.full()))
    print(verify(packed))
    llm = LLM(packed)
    for output in llm.generate(["3+4=", "12+5="], SamplingParams(max_tokens=16)):
        print(f"{output.prompt} {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
