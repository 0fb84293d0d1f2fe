"""The conversation of a row, as the chat template is given it."""

from collections.abc import Mapping
from typing import Any

from offbeat_core import DataError
from offbeat_data._chat.thoughts import open_thoughts
from offbeat_data._escaping import RowNotes, escape_messages, escape_tools
from offbeat_data._images import Picture, RowImages
from offbeat_data._sources.rows import Row, with_system, with_tools
from offbeat_data._sources.sources import SourceConfig
from offbeat_data._tokenizer import Tokenizer


class ChatReader:
    """Prepares the messages of rows for the chat template.

    Args:
        config: the `data` section.
        tokenizer: with a chat template.
        images: reads those of a row.
        notes: counts control tokens in text.
    """

    def __init__(self, config: SourceConfig, tokenizer: Tokenizer, images: RowImages, notes: RowNotes) -> None:
        self._config, self._tokenizer, self._images, self._notes = config, tokenizer, images, notes

    def read(
        self, row: Row, messages: list[dict[str, Any]], source: str
    ) -> tuple[list[dict[str, Any]], Mapping[str, Any], tuple[Picture, ...]]:
        """Return the messages, the variables of the template, and the images.

        Control tokens in the words of a row are escaped, other than the assistant's. The configuration's system prompt
        comes first, as it is. Thoughts have their opening tags.

        Raises:
            ModelError: there is no chat template; or the row has images and the model takes none.
            DataError: a column holds something else than it should, or a message has nothing that the template writes.
        """
        template = self._tokenizer.require_template()
        if not template.writes_calls and any(message.get("content") is None for message in messages):
            raise DataError(
                "the content of a message is null, and the chat template does not write tool_calls, so it would write "
                "nothing of it: use a template that does, or write the calls into the content"
            )
        messages, pictures = self._images.read(row, messages, source)
        options = with_tools(row, self._config.template_options)
        self._notes.words(messages, options)
        options = escape_tools(self._tokenizer, options)
        messages = with_system(escape_messages(self._tokenizer, messages), self._config.system_prompt)
        return open_thoughts(template, messages, options), options, pictures
