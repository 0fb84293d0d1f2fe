"""Rendered conversations as token ids with a loss mask, in which every turn is learned up to its end token."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offbeat_core import Ids
from offbeat_data._chat.template import RenderedChat
from offbeat_data._tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EncodedTurns:
    """Token ids with a loss mask.

    Args:
        ids: [T] int32.
        loss_mask: [T] bool.
        open_ends: for each turn that ends without an end token: the text of the token that comes in its place, "" for
            none.
    """

    ids: Ids
    loss_mask: npt.NDArray[np.bool_]
    open_ends: tuple[str, ...]


def encode_turns(tokenizer: Tokenizer, chat: RenderedChat, num_turns: int, *, adds_end: bool = True) -> EncodedTurns:
    """Encode a conversation; its loss mask holds the tokens of its spans and the end token of each turn.

    A token is learned where it holds a character of one of the spans. Engines stop at the tokens of
    `Tokenizer.end_ids`, so white space that a span holds after one of them is not learned. Where the text after a turn
    begins with one of them (a `{% generation %}` block around the words alone, a template that ends a turn by the
    marker of the next role), it is learned with the turn. After the last turn, where nothing else comes, the end token
    is added.

    Args:
        tokenizer: of the model.
        chat: the conversation and the spans to learn.
        num_turns: assistant turns in the spans; a turn may have several spans.
        adds_end: False leaves a last turn without an end token as it is.
    """
    ids, offsets_T2 = tokenizer.encode_with_offsets(chat.text)
    start_T, end_T = offsets_T2[:, 0], np.maximum(offsets_T2[:, 1], offsets_T2[:, 0] + 1)
    mask_T = np.zeros(len(ids), dtype=np.bool_)
    is_space_T = np.array([not chat.text[start:end].strip() for start, end in offsets_T2], dtype=np.bool_)
    is_end_T = np.isin(ids, list(tokenizer.end_ids))
    inside = [np.flatnonzero((start_T < end) & (end_T > start)) for start, end in chat.spans]
    inside = [_up_to_the_end(tokens, is_space_T, is_end_T) for tokens in inside if len(tokens)]
    for tokens in inside:
        mask_T[tokens] = True
    mask_T[:1] = False  # nothing comes before the first token to predict it from
    firsts = [*(int(tokens[0]) for tokens in inside[1:]), len(ids)]
    open_ends = []
    for tokens, next_first in zip(inside, firsts, strict=True):
        last = int(tokens[-1])
        at = last + 1 + int(np.argmin(np.append(is_space_T[last + 1 :], False)))
        if is_end_T[last]:
            continue
        if at < len(is_end_T) and is_end_T[at]:
            mask_T[last + 1 : at + 1] = True
        elif len(inside) > num_turns and not np.isin(ids[last + 1 : next_first], list(tokenizer.control_ids)).any():
            continue  # the turn has more spans
        elif ids[last] in tokenizer.control_ids:
            open_ends.append(tokenizer.token_text(int(ids[last])) or "")
        elif at < len(ids):
            open_ends.append(tokenizer.token_text(int(ids[at])) or "")
        elif tokenizer.closing_id is None or not adds_end:
            open_ends.append("")
        else:
            ids = np.append(ids[: last + 1], np.int32(tokenizer.closing_id))
            mask_T = np.append(mask_T[: last + 1], True)
    return EncodedTurns(ids=ids, loss_mask=mask_T, open_ends=tuple(open_ends))


def _up_to_the_end(
    tokens: npt.NDArray[np.intp], is_space_T: npt.NDArray[np.bool_], is_end_T: npt.NDArray[np.bool_]
) -> npt.NDArray[np.intp]:
    """Return the tokens of a span without white space after an end token, with which some templates close a turn."""
    words = tokens[~is_space_T[tokens]]
    return tokens[tokens <= words[-1]] if len(words) and is_end_T[words[-1]] else tokens


def find_end(tokenizer: Tokenizer, text: str, start: int, end: int) -> int:
    """Return where a turn of the model ends: behind its end token, where others follow that one.

    Some templates close each turn by an end token and the conversation by another (Phi-3's `<|end|>` and eos). Engines
    stop at the first, so that the second is never sampled.

    Args:
        tokenizer: of the model.
        text: a conversation that ends with the turn.
        start: of the turn, in characters.
        end: of the turn with all that may close it.
    """
    ends = sorted(filter(None, map(tokenizer.token_text, tokenizer.end_ids)), key=len, reverse=True)
    found = at = end
    while at > start:  # backwards, each character once: a token may be white space, and there may be much of it
        token = next((each for each in ends if text.endswith(each, start, at)), "")
        if not token and not text[at - 1].isspace():
            break
        found = at if token else found
        at -= len(token) or 1
    return found


def with_next_marker(tokenizer: Tokenizer, turn: RenderedChat, longer: str) -> RenderedChat:
    """Return a turn followed by the marker of the next role, where engines stop at it.

    Args:
        tokenizer: of the model.
        turn: a conversation that ends with the turn.
        longer: the same with the next message.
    """
    if not longer.startswith(turn.text):
        return turn
    following = longer[len(turn.text) :].lstrip()
    [ids] = tokenizer.encode([following], add_special_tokens=False)
    if not len(ids) or ids[0] not in tokenizer.end_ids:
        return turn
    return RenderedChat(text=turn.text + (tokenizer.token_text(int(ids[0])) or ""), spans=turn.spans)
