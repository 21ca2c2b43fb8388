"""Render every template of tests/data/chat with transformers, and write golden.json there (extra: oracle)."""

import json
import sys
from datetime import datetime
from pathlib import Path

DATA = Path(__file__).parent.parent / "tests" / "data" / "chat"


class FixedDay(datetime):
    """The day on which all templates are rendered."""

    @classmethod
    def now(cls, tz=None):
        return cls(2031, 7, 26)


def main() -> int:
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = FixedDay
    inputs = json.loads((DATA / "conversations.json").read_text())
    golden = {}
    for path in sorted(DATA.glob("*.jinja")):
        for name, messages in inputs["conversations"].items():
            for kind, variables in inputs["variables"].items():
                call = {**inputs["special_tokens"], **variables}
                try:
                    rendered, _ = chat_template_utils.render_jinja_template(
                        [messages], chat_template=path.read_text(), **call
                    )
                    golden[f"{path.stem}/{name}/{kind}"] = rendered[0]
                except Exception as error:
                    golden[f"{path.stem}/{name}/{kind}"] = {"error": str(error)}
    (DATA / "golden.json").write_text(json.dumps(golden, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
