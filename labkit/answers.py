"""Answers questions of the notebook in an engine's control thread, also while the
engine runs something."""

import json
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from labkit.records import KEY


def answer_questions(
    kernel: Any,
    answers: Mapping[str, Callable[..., Any]],
    on_listen: Callable[[Any], None] = lambda parent: None,
) -> None:
    """From now on `answers` has what a question, by its name, is answered by: a
    function of its arguments. `on_listen` gets one that has no single answer."""

    def answer(stream: Any, ident: Any, parent: Any) -> None:
        content = parent["content"]
        if content["request"] == "listen":  # for good
            on_listen(parent)
            return
        try:
            found = answers[content["request"]](**content["arguments"])
            # A file or a thread may have a name that is no text.
            text = json.dumps(found, ensure_ascii=False).encode(errors="replace")
            reply = {"status": "ok", "answer": json.loads(text)}
        except Exception as error:  # the notebook waits for an answer
            reply = {"status": "error", "why": f"{type(error).__name__}: {error}"}
        kernel.session.send(stream, f"{KEY}_reply", reply, parent=parent, ident=ident)

    kernel.control_handlers[f"{KEY}_request"] = answer
