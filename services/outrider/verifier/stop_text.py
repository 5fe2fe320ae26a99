"""The text of a generation that has stop strings: decoded in the engine, where a stop can still end the generation."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.session import SessionSpec
from outrider.core.stop_strings import StopStrings
from outrider.core.tree import TokenId
from outrider.models.text import TextCodec, TextStream


def output_stream(spec: SessionSpec, codec: TextCodec) -> TextStream:
    """Returns a decoder of a generation's output. Its text is what follows the text of the prompt."""
    return codec.stream(
        after=spec.prompt_token_ids,
        # A grammar constrains the text of the tokens themselves, independent of their place.
        keeps_first_space=spec.structure is not None,
        skip_special_tokens=spec.skip_special_tokens,
    )


class StopText:
    """Decodes the output token by token, and ends the generation at a stop string (`outrider.core.session.Ending`)."""

    def __init__(self, spec: SessionSpec, codec: TextCodec) -> None:
        """Begins after the resumed tokens, whose text has been sent as far as it was decided."""
        self._stream = output_stream(spec, codec)
        self._left_out = codec.special_tokens if spec.skip_special_tokens else {}
        self._strings = StopStrings(spec.stop, set(self._left_out.values()), includes_stop=spec.includes_stop)
        self._min_tokens = spec.sampling.min_tokens
        self._num_tokens = 0
        self._text: list[str] = []
        self._ends: list[int] | None = None
        """Ends of the tokens since the last call of `take_text_ends`. None means that the request does not ask for
        them."""
        self.take(spec.resume_token_ids)
        self._num_sent = sum(map(len, self._text))
        """Characters that earlier calls have sent; more may be decoded and held back."""
        self._text.clear()
        if spec.report.text_ends:
            self._ends = []

    @property
    def found(self) -> str | None:
        """The stop string that has ended the generation, if one has."""
        return self._strings.found

    def take(self, token_ids: Sequence[TokenId]) -> int | None:
        """See `outrider.core.session.Ending`."""
        for number, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            # The last of the min_tokens may already end with a stop string.
            may_stop = self._num_tokens >= self._min_tokens
            piece, outlook = self._stream.step([token_id]), self._stream.outlook
            left_out = self._left_out.get(token_id, "")
            self._text.append(self._strings.feed(piece, outlook, left_out, may_stop=may_stop))
            if self._ends is not None:
                self._ends.append(self._stream.num_characters + len(outlook) - self._num_sent)
            if self.found is not None:
                return number
        return None

    def take_text(self) -> str:
        """Returns the text that was decided since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return text

    def take_text_ends(self) -> tuple[int, ...]:
        """Returns where the text of each token taken in since the last call ends, as `Chunk.text_ends` counts it; empty
        if the request does not ask for it."""
        ends = tuple(self._ends or ())
        if self._ends is not None:
            self._ends.clear()
        return ends

    def finish(self) -> str:
        """Returns the rest of the text. No token may follow."""
        if self.found is not None:
            return ""
        # The bytes of an unfinished character may complete a stop string too, but the text ends here anyway.
        return self._strings.feed(self._stream.finish(), may_stop=False) + self._strings.finish()
