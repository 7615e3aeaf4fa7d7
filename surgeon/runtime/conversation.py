"""A conversation with a model that ranks run.

with surgeon.chat(MODEL, ranks=2) as conversation:
    for piece in conversation.say("Why is the sky blue?"):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from surgeon.checkpoint.texts import Encoder, Message, begin_conversation, chat_text, encode
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.service import Answer, Service


class Conversation(AbstractContextManager["Conversation"]):
    """A chat, with answers as they come; leaving it ends the ranks.

    For each answer the whole chat is put into the tokenizer's chat template. Of that the ranks compute what their cache
    does not have from the answers before.

    Attributes:
        service: the ranks that answer.
        messages: with role and content, as chat templates take them.
        answers: all of them, also before `reset`, with their figures.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Any,
        sampling: Sampling | None = None,
        system: str | None = None,
    ) -> None:
        """Begin a chat.

        Args:
            service: with the tokenizer; it is closed with the conversation.
            sampling: of answers; `max_new_tokens` where there is room.
            system: a message before all others.
        """
        self.service = service
        self.answers: list[Answer] = []
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._sampling = sampling or Sampling()
        self._system = system
        self._request: int | None = None
        self._stopped = False
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but for the system message."""
        self.messages: list[Message] = begin_conversation(self._system)

    def say(self, text: str) -> Iterator[str]:
        """Give the pieces of the answer to a message, as they come.

        An answer that is stopped, or whose pieces are left before its end, is part of the conversation as far as it
        came; an empty one is not, and neither is its message.

        Raises:
            ValueError: if the template does not take the messages, or with them there is no room for an answer.
            RankFailed: if a rank fails.
        """
        self._stopped = False
        messages = [*self.messages, {"role": "user", "content": text}]
        room = self.service.max_tokens
        tokens = encode(self._encoder, chat_text(self._tokenizer, messages), room, special=False)
        if len(tokens) >= room:
            raise ValueError(
                f"the conversation has come to {len(tokens)} tokens, and the model's positions, or its cache, have "
                f"room for {room}, an answer among them; forget what was said (/reset, or reset() from Python), or say "
                "less"
            )
        most = min(self._sampling.max_new_tokens, room - len(tokens))
        sampling = replace(self._sampling, max_new_tokens=most, place=(len(self.answers), 0))
        stream = self.service.submit(tokens, sampling)
        self._request = stream.id
        if self._stopped:  # before there was anything to cancel
            self.service.cancel(stream.id)
        answer = Answer()
        self.answers.append(answer)
        try:
            for event in stream:
                answer.add(event)
                if event.text:
                    yield event.text
        finally:
            self.service.cancel(stream.id)
            for event in stream:
                answer.add(event)
            self._request = None
            if answer.text:
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]

    def stop(self) -> None:
        """End the answer after the current pass; from any thread or signal handler."""
        self._stopped = True
        # A thread cancels, as the signal may have interrupted a message to the ranks.
        if self._request is not None:
            threading.Thread(target=self.service.cancel, args=(self._request,)).start()

    def close(self) -> None:
        """End the ranks."""
        self.service.close()

    def __exit__(self, *_: object) -> None:
        self.close()
