"""Conversations and `millstream chat`: what is reused between turns, commands, interruptions, a full context."""

import fcntl
import functools
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from types import SimpleNamespace

import pytest
import tiny_models
from cli_program import ENVIRONMENT, LONG_CONTEXT, PROGRAM, ROOT, assert_error, make_snapshot, run
from gguf_models import write_gguf

import engine
from engine.chat import Conversation, assistant_message
from engine.chat_template import ChatTemplate, choose_template
from engine.commands.chat import Input
from engine.errors import ConfigError

EOS = tiny_models.EOS_TOKEN_ID


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp("chat"), "mha_base")


@pytest.fixture(scope="module")
def loaded(model):
    return engine.load(model)


def conversation(loaded, *args, **options):
    return Conversation(loaded, choose_template(loaded.files), *args, **options)


def answer(chat, text, **options):
    generation = chat.ask(text, **{"max_tokens": 6, "ignore_eos": True, **options})
    list(generation)
    chat.keep(generation)
    return generation


@pytest.fixture(scope="module")
def clean(loaded):
    """Two messages whose answers are whole characters: a tiny random model often ends inside of one."""
    for n in range(100):
        lines = [f"Hello {n}", "More"]
        chat = conversation(loaded)
        if all(loaded.tokenizer.decode(g.token_ids) == g.text for g in (answer(chat, line) for line in lines)):
            return lines
    raise AssertionError("no such answers")


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_a_follow_up_runs_only_what_is_new(loaded, clean):
    chat = conversation(loaded)
    first, second = (answer(chat, line) for line in clean)
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + 6] == first.prompt_token_ids + first.token_ids
    assert second.stats.reused_tokens == len(first.prompt_token_ids) + len(first.token_ids) - 1
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    fresh = loaded.generate(second.prompt_token_ids, max_tokens=6, ignore_eos=True)
    assert "".join(fresh) == second.text


def test_the_prompt_is_the_rendered_conversation(loaded, clean):
    chat = conversation(loaded)
    found = answer(chat, clean[0])
    text = f"<|user|>\n{clean[0]}<|assistant|>\n"
    assert found.prompt_token_ids == loaded.tokenizer.encode(text, add_special_tokens=False)
    second = answer(chat, "x")
    text += f"{found.text}<|endoftext|><|user|>\nx<|assistant|>\n"
    assert loaded.tokenizer.decode(second.prompt_token_ids, skip_special=False) == text
    assert second.prompt_token_ids.count(EOS) == 1


def test_an_answer_keeps_its_tokens_only_up_to_a_border_of_the_template(loaded):
    """Where ordinary text follows, it might have merged with the end of the answer: all is read again."""
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "plain")
    chat = Conversation(loaded, plain)
    encode = functools.partial(loaded.tokenizer.encode, add_special_tokens=False)
    kept = SimpleNamespace(text=" expert", token_ids=encode(" expert"))
    chat.ask("The")
    chat.keep(kept)
    assert encode("The experts") != encode("The") + kept.token_ids + encode("s"), "or nothing would show"
    assert answer(chat, "s").prompt_token_ids == encode("The experts")


def test_an_answer_cut_by_a_stop_text_is_read_as_text(loaded):
    chat = conversation(loaded)
    whole = answer(chat, "Hello", max_tokens=12).text
    chat.reset()
    stop = whole[3]
    cut = answer(chat, "Hello", max_tokens=12, stop=[stop])
    assert (cut.finish_reason, cut.text) == ("stop", whole[: whole.find(stop)])
    assert chat.messages[-1]["content"] == cut.text
    text = chat.render([*chat.messages, {"role": "user", "content": "x"}])
    assert answer(chat, "x").prompt_token_ids == loaded.tokenizer.encode(text, add_special_tokens=False)


def test_half_a_character_at_the_end_is_not_kept(loaded):
    tokenizer = loaded.tokenizer
    chat = conversation(loaded)
    first = chat.ask("Hello")
    ids = tokenizer.encode("a\u20ac\u20ac", add_special_tokens=False)
    assert len(ids) == 7
    chat.keep(SimpleNamespace(text="a\u20ac", token_ids=ids[:6]))
    second = answer(chat, "x").prompt_token_ids
    assert second[: len(first.prompt_token_ids) + 5] == [*first.prompt_token_ids, *ids[:4], EOS]


def test_a_token_that_ends_inside_of_a_character_is_not_kept(loaded, monkeypatch):
    chat = conversation(loaded)
    monkeypatch.setattr(loaded.tokenizer, "token_bytes", lambda token: {7: b"a", 8: b"b\xe2", 9: b"\x82\xac"}[token])
    assert chat._said(SimpleNamespace(text="a", token_ids=[7, 8])) == [7]
    assert chat._said(SimpleNamespace(text="ab", token_ids=[7, 8])) is None
    assert chat._said(SimpleNamespace(text="ab\u20ac", token_ids=[7, 8, 9])) == [7, 8, 9]


def test_a_question_without_an_answer_is_forgotten(loaded):
    chat = conversation(loaded)
    next(iter(chat.ask("Hello", ignore_eos=True)))
    assert chat.messages == []
    answer(chat, "More")
    assert [m["content"] for m in chat.messages][:1] == ["More"]


def test_reset_keeps_nothing_but_a_system_message(loaded):
    chat = conversation(loaded, "Be brief")
    first = answer(chat, "Hello")
    chat.reset(chat.system)
    again = answer(chat, "Hello")
    assert (again.prompt_token_ids, again.text) == (first.prompt_token_ids, first.text)
    chat.reset()
    assert chat.messages == []


def test_channels_of_an_answer_become_fields():
    text = "<|channel|>analysis<|message|>Hm.\n<|start|>assistant<|channel|>final<|message|>Hello"
    assert assistant_message(text) == {"role": "assistant", "content": "Hello", "thinking": "Hm.\n"}
    cut = "<|channel|>analysis<|message|>Hm"
    assert assistant_message(cut) == {"role": "assistant", "content": "", "thinking": "Hm"}
    call = "<|channel|>commentary to=functions.f json<|message|>{}"
    assert assistant_message(call)["content"] == "{}"
    assert assistant_message("plain") == {"role": "assistant", "content": "plain"}


# ---- a full context --------------------------------------------------------------------------------------------------


def test_a_full_context_is_refused_with_both_numbers(model):
    chat = conversation(engine.load(model, ctx=80), "Be")
    answer(chat, "Hello")
    before = list(chat.messages)
    with pytest.raises(
        ConfigError, match=r"the conversation has \d{3} tokens, the context holds 80.*/reset.*--truncate"
    ):
        chat.ask("x" * 100)
    assert chat.messages == before
    assert answer(chat, "y", max_tokens=1).prompt_token_ids


def test_truncate_forgets_whole_turns_and_says_how_many(model):
    chat = conversation(engine.load(model, ctx=100), "Be", truncate=True)
    forgotten = []
    for n in range(6):
        answer(chat, f"{n} question")
        forgotten.append(chat.num_forgotten)
        assert chat.messages[0]["role"] == "system"
        assert chat.messages[1]["role"] == "user"
    assert forgotten[0] == 0 and 2 in forgotten
    assert len(chat.messages) == 1 + 12 - sum(forgotten)
    assert chat.messages[-2]["content"] == "5 question"
    with pytest.raises(ConfigError, match=r"the context holds 100.*shorten it"):
        chat.ask("x" * 200)


# ---- the program, piped ----------------------------------------------------------------------------------------------


def chat_with(model, *lines, options=(), **kwargs):
    return run("chat", "-m", model, "-n", 6, *options, text_in="\n".join(lines) + "\n", **kwargs)


def prefills(done):
    """(tokens run, tokens found in the cache) of every answer."""
    return [(int(a), int(b or 0)) for a, b in re.findall(r"\[prefill (\d+) .*?tok/s\)(?: \((\d+) more)?", done.stderr)]


def test_lines_of_a_pipe_are_messages(model, loaded, clean):
    done = chat_with(model, *clean, "")
    chat = conversation(loaded)
    texts = [answer(chat, line, ignore_eos=False).text for line in clean]
    assert (done.returncode, done.stdout) == (0, "".join(text.rstrip("\n") + "\n" for text in texts))
    (first, none), (second, reused) = prefills(done)
    assert none == 0 < second < reused == first + 5
    assert "stop tokens: '<|endoftext|>'" in done.stderr
    assert re.search(r"finish: length;.*; context \d+ of 256\]", done.stderr)
    assert "> " not in done.stdout and "Traceback" not in done.stderr


def test_commands(model, tmp_path):
    save = [f"/save {tmp_path / name}" for name in ("a.json", "b.json")]
    lines = ["Hello", save[0], "/reset", "Hello", "/system Be brief", "Hello", save[1], "/help", "/quit", "never"]
    done = chat_with(model, *lines, options=["--system", "Be long"])
    assert done.returncode == 0
    first, second, third = prefills(done)
    assert first == (second[0] + second[1], 0), "the same prompt again"
    assert third != second
    saved = [json.loads((tmp_path / name).read_text())["messages"] for name in ("a.json", "b.json")]
    assert [m["role"] for m in saved[0]] == ["system", "user", "assistant"] == [m["role"] for m in saved[1]]
    assert [saved[0][0]["content"], saved[1][0]["content"]] == ["Be long", "Be brief"]
    assert saved[0][2]["content"].rstrip("\n") == done.stdout.split("\n")[0]
    for name in ("/reset", "/system", "/save", "/quit", "/help"):
        assert name in done.stderr
    assert len(prefills(done)) == 3


def test_messages_of_several_lines(model, tmp_path):
    chat_with(model, "a\\", "b", '"""', "c", "/quit", "d\\", '"""', f"/save {tmp_path / 'x'}")
    saved = json.loads((tmp_path / "x").read_text())["messages"]
    assert [m["content"] for m in saved if m["role"] == "user"] == ["a\nb", "c\n/quit\nd\\"]


def test_errors_of_a_pipe_end_the_program(model, tmp_path):
    refused = {
        "/bogus": "/bogus is no command; /help lists them",
        "/save": "needs a file name",
        f"/save {tmp_path}/no/x": "cannot be written",
        "x" * 300: "the context holds 256",
    }
    for line, text in refused.items():
        assert_error(chat_with(model, line, "Hello"), text)
    done = subprocess.run([*PROGRAM, "chat", "-m", model], cwd=ROOT, env=ENVIRONMENT, input=b"\xff\n",
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 2
    assert b"stdin: not valid UTF-8 at byte 0" in done.stderr


@pytest.mark.parametrize("text", ['"""\na\nb\n', "a\\\n"])
def test_half_a_message_of_a_pipe_is_refused(model, text):
    assert_error(run("chat", "-m", model, "-n", 2, text_in=text), "stdin: ends inside of a message, expected")


def test_figures_of_speculation_are_printed_once(model):
    assert chat_with(model, "Hello", options=["--spec", 4]).stderr.count("[spec: ") == 1


def test_truncate_option(model):
    lines = [f"{n} question" for n in range(6)]
    assert_error_after(chat_with(model, *lines, options=["--ctx", 100]), "the context holds 100", "--truncate")
    done = chat_with(model, *lines, options=["--ctx", 100, "--truncate"])
    assert (done.returncode, len(prefills(done))) == (0, 6)
    assert "note: the context is full; the 2 oldest messages were forgotten" in done.stderr


def assert_error_after(done, *texts):
    assert done.returncode == 2
    assert all(text in done.stderr.splitlines()[-1] for text in texts)


def test_answers_end_with_the_context(model):
    done = run("chat", "-m", model, "--ctx", 40, text_in="Hello\n", MILLSTREAM_ISA="scalar")
    assert "finish: context" in done.stderr or "finish: eos" in done.stderr
    assert ("the answer was cut, the context is full" in done.stderr) == ("finish: context" in done.stderr)


def test_options_of_a_draw_count(model):
    texts = {chat_with(model, "Hello", options=["--temperature", 2, "--seed", seed]).stdout for seed in (1, 2)}
    assert len(texts | {chat_with(model, "Hello").stdout}) == 3
    again = chat_with(model, "Hello", options=["--temperature", 2, "--seed", 1]).stdout
    assert again in texts


def test_speculation_changes_no_text(model):
    lines = ["a b a b a b a b", "a b a b"]
    found = chat_with(model, *lines, options=["--spec", 4, "-n", 20])
    assert found.stdout == chat_with(model, *lines, options=["-n", 20]).stdout
    assert found.stderr.count("[spec: ") == 2  # one line per answer


def test_a_model_without_a_template_says_so(tmp_path):
    assert_error(run("chat", text_in="x\n"), "no chat template", "--chat-template FILE")
    assert_error(run("generate", "x", "--chat"), "no chat template", "--chat-template FILE")
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    done = run("chat", "--chat-template", file, "-n", 4, text_in="Hello\n")
    assert done.returncode == 0 and str(file) in done.stderr
    file.write_text("a\n{{ raise_exception('not so') }}")
    assert_error(run("generate", "x", "--chat", "--chat-template", file), f"{file}: line 2: not so")


def test_generate_chat(model, loaded):
    options = ["-m", model, "-n", 6, "--json", "--ignore-eos"]
    found = json.loads(run("generate", "Hello", "--chat", *options).stdout)
    expected = answer(conversation(loaded), "Hello")
    assert (found["prompt_token_ids"], found["text"]) == (expected.prompt_token_ids, expected.text)
    system = json.loads(run("generate", "Hello", "--chat", "--system", "Be brief", *options).stdout)
    assert system["prompt_token_ids"] == answer(conversation(loaded, "Be brief"), "Hello").prompt_token_ids
    assert_error(run("generate", "x", "-m", model, "--system", "y"), "--system does nothing without --chat")
    assert_error(run("generate", "x", "-m", model, "--chat-template", "y"), "--chat-template does nothing")


def test_templates_of_a_gguf_file(tmp_path):
    named = {"default": "{{ messages[0].content }}<|endoftext|>", "loud": "{{ messages[0].content | upper }}"}
    file = tmp_path / "chat.gguf"
    write_gguf(file, "mha_base", edit=lambda writer: writer.add_chat_template(
        [{"name": name, "template": template} for name, template in named.items()]))  # fmt: skip
    options = ["generate", "abc", "--chat", "-m", file, "-n", 1, "--json"]
    ids = [json.loads(run(*options, *more).stdout)["prompt_token_ids"] for more in ([], ["--chat-template", "loud"])]
    tokenizer = engine.load(file).tokenizer
    assert [tokenizer.decode(found, skip_special=False) for found in ids] == ["abc<|endoftext|>", "ABC"]
    assert json.loads(run("inspect", file, "--json").stdout)["tokenizer"]["chat_template"] is True


# ---- the program on a terminal ---------------------------------------------------------------------------------------


class Terminal:
    """The program on a pseudo-terminal of its own."""

    def __init__(self, *args):
        self.process, self.fd = None, None
        parent, child = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, args)], cwd=ROOT, env={**ENVIRONMENT, "TERM": "dumb"}, stdin=child, stdout=child,
            stderr=child, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(child)
        self.fd, self.seen = parent, ""

    def send(self, text):
        os.write(self.fd, text.encode())

    def until(self, pattern, seconds=30):
        """Read until the pattern comes; returns what was read, and forgets it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.fd], [], [], max(0, end - time.monotonic()))
            assert ready, f"{pattern!r} did not come; {self.seen!r}"
            try:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                raise AssertionError(f"{pattern!r} did not come before the end; {self.seen!r}") from None
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    snapshot = make_snapshot(folder, {"max_position_embeddings": LONG_CONTEXT, "eos_token_id": None})
    opened = Terminal("chat", "-m", snapshot, "--chat-template", write_template(folder))
    yield opened
    opened.close()


def write_template(folder):
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    return folder / "t.jinja"


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal):
    terminal.until("/help lists the commands")
    terminal.until("> ")
    terminal.send("Hello\n")
    terminal.until(r"Hello\r?\n(?s:.){20}")  # the echo, and some of an answer that would go on for minutes
    terminal.send("\x03")
    terminal.until(r"finish: interrupted")
    terminal.until("> ")
    terminal.send("/bogus\n")
    terminal.until("error: /bogus is no command")
    terminal.until("> ")
    terminal.send("More\n")
    terminal.until(r"More\r?\n(?s:.){20}")
    terminal.send("\x03")
    assert re.search(r"prefill [3-9] tokens .*\(\d+ more were in the cache\)", terminal.until("finish: interrupted"))
    terminal.until("> ")
    terminal.send("\x04")
    assert terminal.process.wait(timeout=20) == 0


def test_lines_can_be_edited_and_come_back(terminal):
    terminal.until("> ")
    terminal.send("/hxelp\x01\x06\x06\x04\n")  # to the start, right twice, delete
    terminal.until("forget the conversation")
    terminal.until("> ")
    terminal.send("\x10\n")  # the previous line again
    terminal.until("forget the conversation")
    terminal.send("/quit\n")
    assert terminal.process.wait(timeout=20) == 0


def test_ctrl_c_while_typing_forgets_the_line(monkeypatch, capsys):
    """Without a terminal: a Ctrl-C that comes just before readline waits for a key is seen only after the next one."""
    typed = iter(["first\\", KeyboardInterrupt, "second", EOFError])

    def line(self, prompt):
        item = next(typed)
        if isinstance(item, str):
            return item
        raise item

    monkeypatch.setattr(Input, "line", line)
    source = Input()
    source.interactive = True
    assert list(source.messages()) == ["second"]
    assert "(/quit or Ctrl-D leaves)" in capsys.readouterr().err
    source.interactive, typed = False, iter([KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        list(source.messages())


def test_interrupt_of_a_pipe_ends_the_program(model):
    process = subprocess.Popen([*PROGRAM, "chat", "-m", str(model)], cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    while b"stop tokens" not in process.stderr.readline():
        pass
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)
    assert process.returncode == 130
    process.communicate()
