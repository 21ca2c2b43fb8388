"""What scripts/compare_llama_cpp.py prints beside the speeds: all that is needed to make a result again."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import compare_llama_cpp as compare
from run_facts import run_facts

SPEED = {"median": 10.0, "spread": 0.1}


def result(repacked: bool) -> dict:
    engine = {
        "tier": "avx2", "peak_rss_bytes": 2_000, "load_s": 0.5, "first_token_s": 0.75, "prefill_tok_s": SPEED,
        "decode_tok_s": SPEED,
    }  # fmt: skip
    return {
        "file": "m.gguf", "file_bytes": 1_000, "threads": 2, "rounds": 3, "prompt": 7, "tokens": 5, "equal_tokens": 4,
        "expert_layout": "compact", "phases_ms": {"experts": 1.0, "step": 4.0}, "prefill_tok_s_ratio": 1.0,
        "decode_tok_s_ratio": 1.0, "millstream": engine, "llama.cpp": engine | {"repacked": repacked},
        "facts": run_facts() | {"llama-cpp-python": "9.9"},
    }  # fmt: skip


def test_text_names_command_versions_and_machine():
    made = result(False)
    text = compare.as_text(made)
    assert all(str(made["facts"][key]) in text for key in ("millstream", "command", "cpu", "kernel", "load", "time"))
    assert "llama-cpp-python 9.9" in text and (made["facts"]["revision"] or "no git revision") in text
    assert "millstream (avx2, experts compact)" in text and "llama.cpp (avx2, weights as in the file)" in text
    assert "weights re-packed" in compare.as_text(result(True))


def test_equal_tokens_are_counted_from_the_start():
    assert compare.equal_tokens([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert compare.equal_tokens([1, 2], [1, 2]) == 2
