"""The only place where text and messages become token ids.

Raw text gets the tokenizer's own leading token (such as BOS) if the tokenizer adds one by default, and never a trailing one.
Chat messages go through the model's chat template, which writes its special tokens itself. Later observations are encoded
alone and appended: what was sampled is never encoded again (`rollout.dialogue` finds out what is new).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import numpy as np

from laminar.errors import ConfigError, first_line, reason
from laminar.text import storable
from laminar.types import Int32Array, Message, Prompt

ChatMessage = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and what else the template knows."""


class Tokenizer(Protocol):
    """What an episode needs of a tokenizer."""

    def encode(self, content: str | tuple[Message, ...], /) -> Int32Array:
        """(T,) int32: how an episode begins."""
        ...

    def encode_observation(self, text: str, /) -> Int32Array:
        """(T,) int32: text that is appended to a running episode."""
        ...

    def decode(self, token_ids: Sequence[int] | Int32Array, *, keep_special: bool = False) -> str:
        """Text of (T,) ids, special tokens left out unless `keep_special`."""
        ...

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = (), /) -> str:
        """The chat template's text of a whole conversation, up to where the policy is to go on."""
        ...


class HuggingFaceTokenizer:
    """A `transformers` tokenizer."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        # the Rust part alone: half of the CPU of a turn would go into the wrapper's checks of its arguments
        self._fast = tokenizer.backend_tokenizer if _is_plain(tokenizer) else None
        self._templates_plainly = _has_no_template_method_of_its_own(tokenizer)
        self._leading = self._default_leading_ids()
        self._token_texts: dict[tuple[int, bool], str] = {}  # of single tokens, such as end marks, asked for at every turn

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self._tokenizer)

    @property
    def end_token_id(self) -> int | None:
        """The tokenizer's own end id; None if it has none."""
        end = self._tokenizer.eos_token_id
        return None if end is None else int(end)

    def encode(self, content: str | tuple[Message, ...]) -> Int32Array:
        """(T,) int32: raw text with the tokenizer's leading token, or messages through the chat template.

        Raises:
            ConfigError: messages, but no chat template, or one that refuses them.
        """
        if isinstance(content, str):
            return np.concatenate([self._leading, self.encode_observation(content)])
        return self.encode_observation(self.render([chat_message(message) for message in content]))

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The chat template's text, with its generation prompt.

        Raises:
            ConfigError: there is no template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"tokenizer {self._name} has no chat template; use raw text prompts or a chat model's tokenizer"
            )
        try:
            if self._templates_plainly and all(map(_is_plain_message, messages)):
                return self._render_plain(messages, tools)
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise ConfigError(f"the chat template of {self._name} refuses these messages: {reason(error)}") from error

    def _render_plain(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> str:
        """As `apply_chat_template`, whose copies and checks take longer than the template and do nothing to plain text."""
        from transformers.utils.chat_template_utils import _compile_jinja_template  # keeps what it has compiled

        template = _compile_jinja_template(self._tokenizer.chat_template)
        settings = {"documents": None, "add_generation_prompt": True, **self._tokenizer.special_tokens_map}
        return str(template.render(messages=list(messages), tools=list(tools) or None, **settings))

    def encode_observation(self, text: str) -> Int32Array:
        """(T,) int32: exactly this text, nothing added; a lone surrogate, which no tokenizer takes, becomes `?`."""
        text = storable(text)
        if self._fast is not None:
            return np.asarray(self._fast.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def encode_prompt(self, prompt: Prompt, max_prompt_tokens: int | None = None) -> Int32Array:
        """(T,) int32: the prompt as an episode begins with it.

        Raises:
            ConfigError: it has no token, or more than `max_prompt_tokens`.
        """
        token_ids = self.encode(prompt.content)
        if not len(token_ids):
            raise ConfigError(f"prompt {prompt.prompt_id} has no token; remove it from the data")
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            raise ConfigError(
                f"prompt {prompt.prompt_id} has {len(token_ids)} tokens, data.max_prompt_tokens is {max_prompt_tokens}; "
                "shorten or remove it, or raise the limit"
            )
        return token_ids

    def check_prompts(self, prompts: Iterable[Prompt], max_prompt_tokens: int) -> int:
        """Encode every prompt once; the longest one's length in tokens.

        Raises:
            ConfigError: as `encode_prompt`.
        """
        return max((len(self.encode_prompt(prompt, max_prompt_tokens)) for prompt in prompts), default=0)

    def decode(self, token_ids: Sequence[int] | Int32Array, *, keep_special: bool = False) -> str:
        """Text of (T,) ids; bytes that are no whole character yet show as U+FFFD."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else [int(token_id) for token_id in token_ids]
        if len(ids) != 1:
            return self._decode(ids, keep_special)
        key = (ids[0], keep_special)
        if key not in self._token_texts:
            self._token_texts[key] = self._decode(ids, keep_special)
        return self._token_texts[key]

    def _decode(self, ids: list[int], keep_special: bool) -> str:
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=not keep_special))
        return str(self._tokenizer.decode(ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False))

    def _default_leading_ids(self) -> Int32Array:
        bos = self._tokenizer.bos_token_id
        adds_bos = bos is not None and self._tokenizer("a")["input_ids"][:1] == [bos]
        return np.asarray([bos] if adds_bos else [], dtype=np.int32)


_PLAIN_KEYS = {"role", "content"}
_OWN_METHODS = ("_decode", "_encode_plus")
"""What a tokenizer's class overrides if it does something of its own."""


def _is_plain(tokenizer: Any) -> bool:
    """Whether the wrapper adds nothing to its Rust part: no method of its own, no splitting, trimming or padding."""
    from transformers import PreTrainedTokenizerFast

    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and all(getattr(type(tokenizer), name, 0) is getattr(PreTrainedTokenizerFast, name, 0) for name in _OWN_METHODS)
        and not getattr(tokenizer, "split_special_tokens", False)
        and tokenizer.backend_tokenizer.truncation is None
        and tokenizer.backend_tokenizer.padding is None
    )


def _has_no_template_method_of_its_own(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    return own is PreTrainedTokenizerBase.apply_chat_template and isinstance(tokenizer.chat_template, str)


def _is_plain_message(message: ChatMessage) -> bool:
    return message.keys() == _PLAIN_KEYS and type(message["content"]) is str


def chat_message(message: Message) -> ChatMessage:
    """As chat templates take it."""
    return {"role": message.role, "content": message.content}


def load_tokenizer(folder: str | Path) -> HuggingFaceTokenizer:
    """The tokenizer in a local folder, from which nothing is downloaded, or of a model on the Hugging Face hub.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer  # takes seconds, and episodes with other tokenizers need none of it

    try:
        return HuggingFaceTokenizer(
            AutoTokenizer.from_pretrained(str(folder), local_files_only=Path(folder).is_dir()), str(folder)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {folder}: {first_line(error)}; set model.path or model.tokenizer"
        ) from error
