"""Transcribes whole recordings with a Whisper model."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .audio import SAMPLE_RATE
from .beams import Queries, log_sum, search
from .features import HOP, check_extractor, log_mel
from .speech_options import Options
from .transcription import AnyTranscriber, Heard, Segment, Windows, compression_ratio
from .words import boundaries, words

if TYPE_CHECKING:
    import torch

    from ..hf.config import LowBitConfig

_FRAMES_PER_POSITION = 2  # feature frames per encoder position and per timestamp
_SECONDS_PER_POSITION = _FRAMES_PER_POSITION * HOP / SAMPLE_RATE
_LEAST_TEMPERATURE = 1e-6  # logits divided by less may overflow
_MOST_FOLLOWED = 0.5  # the text of a window with a higher temperature is not shown to the next one
# The settings of generation that transcription uses.
SETTINGS = (
    "decoder_start_token_id", "eos_token_id", "no_timestamps_token_id", "prev_sot_token_id", "lang_to_id", "task_to_id",
    "suppress_tokens", "begin_suppress_tokens", "max_initial_timestamp_index",
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """The text of a window."""

    tokens: list[int]
    logprobs: list[float]  # of the tokens, and of the end
    queries: list[Queries]  # after each token that the model has read
    temperature: float
    compression_ratio: float
    no_speech_prob: float

    @property
    def avg_logprob(self) -> float:
        return float(np.mean(self.logprobs)) if self.logprobs else 0.0


class Transcriber(AnyTranscriber):
    """Transcribes recordings of any length with a Whisper model and its processor.

    Longer recordings are read in windows of 30 seconds, each starting where the last segment of the previous one ended (Radford
    et al., Robust Speech Recognition via Large-Scale Weak Supervision, 2022).
    """

    decoder: Any  # SpeechDecoder, or PlannedSpeech, which needs no torch

    def __init__(self, model: torch.nn.Module, processor: Any, cache: str | None = None):
        """
        Args:
            model: transformers' ``WhisperForConditionalGeneration``, quantized or not, in eval mode. It is changed:
                :class:`SpeechDecoder`.
            processor: transformers' ``WhisperProcessor``.
            cache: as for :class:`SpeechDecoder`.

        Raises:
            ValueError: as :class:`SpeechDecoder`; or the generation settings or those of features are not Whisper's.
        """
        from .speech_decoder import SpeechDecoder

        check_extractor(processor.feature_extractor)
        decoder = SpeechDecoder(model, cache)
        settings: Any = copy.copy(decoder.model.generation_config)
        _complete(settings, processor.tokenizer.get_added_vocab())
        self._begin(decoder, settings, processor.tokenizer)

    def _begin(self, decoder: Any, settings: Any, tokenizer: Any) -> None:
        self.decoder, self._settings, self._tokenizer = decoder, settings, tokenizer.backend_tokenizer
        for name in ("no_timestamps_token_id", "decoder_start_token_id", "eos_token_id"):
            if not isinstance(getattr(self._settings, name, None), int):
                raise ValueError(f"the model's generation_config has no {name}; expected a token, as in Whisper's files")
        self._languages: dict[str, int] = {name.strip("<|>"): token for name, token in self._settings.lang_to_id.items()}

    @property
    def languages(self) -> list[str]:
        return sorted(self._languages)

    def windows(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor, **options: Any) -> Windows:
        samples, wish = self.samples(audio), Options(**options)
        self.check(wish)
        window = self.window * HOP
        if not wish.timestamps and len(samples) > window:
            raise ValueError(
                f"the recording has {len(samples) / SAMPLE_RATE:.1f} seconds; expected at most "
                f"{window / SAMPLE_RATE:.0f} without timestamps"
            )
        # Computed here and not with the first segment, so that a server can do it in parallel with the model's other work.
        features = log_mel(samples, self.decoder.mel_bins, self.window)
        return self._windows(features, len(samples), wish)

    @property
    def no_timestamps(self) -> int:
        """The token before those of timestamps."""
        return int(self._settings.no_timestamps_token_id)

    @property
    def window(self) -> int:
        """The feature frames of a window."""
        return int(self.decoder.positions * _FRAMES_PER_POSITION)

    def detect_language(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor) -> dict[str, float]:
        """The probability of each language in the first window of a recording, the likeliest first.

        Raises:
            ValueError: as :meth:`transcribe`, or the model knows only English.
        """
        if not self._languages:
            raise ValueError("the model knows only English; expected a model of several languages")
        features = log_mel(self.samples(audio)[: self.window * HOP], self.decoder.mel_bins, self.window)
        self.decoder.listen(features[None])
        return self._detect(self.decoder.feed([self._settings.decoder_start_token_id], 0))

    def check(self, wish: Options) -> None:
        """Raises ValueError for options that the model does not support."""
        task, language, tasks = wish.task, wish.language, self._settings.task_to_id
        if task not in ("transcribe", "translate") or (task == "translate" and task not in tasks):
            known = " or ".join(tasks) if tasks else "transcribe"
            raise ValueError(f"task is {task!r}; expected {known}")
        if language is not None and language not in self._languages:
            known = ", ".join(self.languages) if self._languages else "None, as the model knows only English"
            raise ValueError(f"language is {language!r}; expected {known}")
        if self._needs_previous(wish) and not isinstance(getattr(self._settings, "prev_sot_token_id", None), int):
            raise ValueError("the model has no token <|startofprev|>; expected no prompt, and no text of earlier windows")
        self.tokens_of(wish.prompt)

    @staticmethod
    def _needs_previous(wish: Options) -> bool:
        return bool(wish.prompt.strip()) or wish.condition_on_previous_text

    def tokens_of(self, prompt: str) -> list[int]:
        """The tokens of a prompt; raises ValueError if it has special tokens."""
        text = prompt.strip()
        tokens: list[int] = self._tokenizer.encode(" " + text, add_special_tokens=False).ids if text else []
        for token in tokens:
            if token >= self._settings.eos_token_id:
                raise ValueError(f"prompt has the special token {self._tokenizer.id_to_token(token)}; expected only text")
        return tokens

    def _windows(self, features: np.ndarray, samples: int, wish: Options) -> Windows:
        duration = samples / SAMPLE_RATE
        frames = -(-samples // HOP)  # the features may have more frames, which are silent
        language, probability, seek = wish.language, None, 0
        prompt, history = self.tokens_of(wish.prompt), list[int]()
        while seek < frames:
            count = min(self.window, frames - seek)
            piece = features[:, seek : seek + self.window]
            self.decoder.listen(np.pad(piece, ((0, 0), (0, self.window - piece.shape[1])))[None])
            if self._languages and language is None:
                language, probability = self.detected()
            written = self.write(wish, language, [*prompt, *history], (wish.seed, seek))
            if self.is_silence(written, wish):
                seek += count
                yield []
                continue
            tokens = written.tokens
            if wish.timestamps:
                parts, used = segments_of(tokens, self.no_timestamps + 1, count)
            else:
                parts, used = [(0, count // _FRAMES_PER_POSITION, tokens)], count
            found = self.segments(parts, written, (seek, count), duration, wish, language)
            if wish.condition_on_previous_text:
                history = [*history, *(token for segment in found for token in segment.tokens)]
                history = history[-self.decoder.max_length :] if written.temperature <= _MOST_FOLLOWED else []
            yield found
            seek += used
        return Heard(language, probability, duration)

    def segments(
        self,
        parts: list[tuple[int, int, list[int]]],
        written: Written,
        frames: tuple[int, int],
        duration: float,
        wish: Options,
        language: str | None,
    ) -> list[Segment]:
        """The segments of a window.

        Args:
            parts: begin, end and tokens of each (:func:`segments_of`).
            frames: the first frame of the window, and their number.
            duration: the length of the recording in seconds.
        """
        offset = frames[0] * HOP / SAMPLE_RATE
        facts = (written.temperature, written.avg_logprob, written.compression_ratio, written.no_speech_prob)
        ends = self._token_ends(written, frames[1]) if wish.word_timestamps else None
        found, at = [], 0
        for begin, end, tokens in parts:
            start, stop = (round(min(offset + place * _SECONDS_PER_POSITION, duration), 2) for place in (begin, end))
            timed = None
            if ends is not None:
                kept = [number for number, token in enumerate(tokens, at) if token < self._settings.eos_token_id]
                times = [round(min(max(offset + ends[n + i], start), stop), 2) for n in kept for i in (0, 1)]
                chances = np.exp([written.logprobs[number] for number in kept])
                text = [written.tokens[number] for number in kept]
                timed = words(text, times, chances, self.decoded, "en" if wish.task == "translate" else language)
            found.append(Segment(start, stop, self.decoded(tokens), tokens, *facts, timed))
            at += len(tokens)
        return found

    def _token_ends(self, written: Written, frames: int) -> list[float]:
        """The seconds of a window at which its first token begins, and at which each token ends."""
        rows = len(written.queries)
        if not rows:  # a single token, the last that fits
            return [0.0] * (len(written.tokens) + 1)
        decoder, keys = self.decoder, self.decoder.heard_keys()
        heads = [(decoder.aligned_layers.index(layer), head) for layer, head in decoder.alignment_heads]
        queries = np.stack([[row[layer][head] for row in written.queries] for layer, head in heads])
        chosen = np.stack([keys[layer][head] for layer, head in heads])
        positions = max(1, frames // _FRAMES_PER_POSITION)
        found = boundaries(queries, chosen, positions, queries.shape[-1] ** -0.5, decoder.median_filter_width)
        ends = [0.0, *(float(place) * _SECONDS_PER_POSITION for place in found)]
        return ends + ends[-1:] * (len(written.tokens) - rows)  # the model does not read the last token that fits

    def decoded(self, tokens: list[int]) -> str:
        """The text of tokens, without timestamps."""
        text: str = self._tokenizer.decode([token for token in tokens if token <= self.no_timestamps], skip_special_tokens=True)
        return text

    def detected(self) -> tuple[str, float]:
        """The language of the window that the decoder has heard, and its probability."""
        return next(iter(self._detect(self.decoder.feed([self._settings.decoder_start_token_id], 0)).items()))

    def _detect(self, logits: np.ndarray) -> dict[str, float]:
        codes = list(self._languages)
        chosen = logits[[self._languages[code] for code in codes]]
        weights = np.exp(chosen - chosen.max())
        chances = weights / weights.sum()
        return {codes[n]: round(float(chances[n]), 4) for n in np.argsort(-chances, kind="stable")}

    def _suppressed(self, name: str) -> list[int]:
        return list(getattr(self._settings, name, None) or [])

    @staticmethod
    def is_silence(written: Written, wish: Options) -> bool:
        """Whether a window has no speech."""
        if wish.no_speech_threshold is None or written.no_speech_prob <= wish.no_speech_threshold:
            return False
        return wish.logprob_threshold is None or written.avg_logprob <= wish.logprob_threshold

    def write(
        self, wish: Options, language: str | None, previous: Sequence[int], seed: tuple[int, int], begin: Sequence[int] = ()
    ) -> Written:
        """The text of the window that the decoder has heard.

        Args:
            previous: the text before it; the model sees as many of its last tokens as half of its positions hold.
            seed: the seed of random tokens.
            begin: the first tokens of the text, if they are known.
        """
        settings, previous = self._settings, list(previous)[-(self.decoder.max_length // 2 - 1) :]
        first = [*([settings.prev_sot_token_id, *previous] if previous else []), settings.decoder_start_token_id]
        logits = self.decoder.feed(first, 0)
        # The token before "no timestamps" stands for silence.
        silence = float(np.exp(logits[settings.no_timestamps_token_id - 1] - log_sum(logits)))
        rest = []
        if self._languages:
            assert language is not None
            rest = [self._languages[language], settings.task_to_id[wish.task]]
        rest += [*([] if wish.timestamps else [settings.no_timestamps_token_id]), *begin]
        for number, temperature in enumerate(wish.temperatures):
            draws = np.random.default_rng((*seed, number)) if temperature else None
            tokens, logprobs, queries = self._attempt(logits.copy(), rest, len(first), len(begin), wish, temperature, draws)
            ratio = compression_ratio(self.decoded([*begin, *tokens]))
            written = Written([*begin, *tokens], logprobs, queries, temperature, ratio, silence)
            most, least = wish.compression_ratio_threshold, wish.logprob_threshold
            fails = (most is not None and ratio > most) or (least is not None and written.avg_logprob < least)
            if not fails or self.is_silence(written, wish):
                break
        return written

    def _attempt(
        self, logits: np.ndarray, rest: list[int], start: int, known: int, wish: Options, temperature: float, draws: Any
    ) -> tuple[list[int], list[float], list[Queries]]:
        """Tokens, their log-probabilities and queries.

        Args:
            logits: the logits after the first ``start`` tokens.
            rest: the tokens after these, before the text.
            known: the number of tokens of the text at the end of ``rest``.
            draws: the source of random numbers.
        """
        if draws is None and wish.beams > 1:
            return self._search(logits, rest, start, known, wish)
        tokens, logprobs, queries = rest[len(rest) - known :], list[float](), list[Queries]()
        step = rest
        while start + len(step) < self.decoder.max_length:
            if step:
                logits = self.decoder.feed(step, start)
                start += len(step)
                if wish.word_timestamps and step is not rest:
                    queries += self.decoder.queries
            self._limit(logits, tokens, wish)
            scores = (
                logits if draws is None else logits / max(temperature, _LEAST_TEMPERATURE) + draws.gumbel(size=logits.shape)
            )
            token = int(scores.argmax())
            logprobs.append(float(logits[token] - log_sum(logits)))
            if token == self._settings.eos_token_id:
                break
            tokens.append(token)
            step = [token]
        return tokens[known:], logprobs, queries

    def _search(
        self, logits: np.ndarray, rest: list[int], start: int, known: int, wish: Options
    ) -> tuple[list[int], list[float], list[Queries]]:
        """As :meth:`_attempt`, by a search over several texts."""
        length = start + len(rest)
        if length >= self.decoder.max_length:
            return [], [], []
        if rest:
            logits = self.decoder.feed(rest, start)

        def advance(tokens: list[int], sources: list[int]) -> tuple[np.ndarray, list[Queries]] | None:
            nonlocal length
            if length + 1 >= self.decoder.max_length:
                return None
            found = self.decoder.feed_beams(tokens, sources, length)
            length += 1
            return found, self.decoder.queries

        limit, end = (lambda row, tokens: self._limit(row, tokens, wish)), self._settings.eos_token_id
        best = search(wish.beams, logits, rest[len(rest) - known :], end, limit, advance)
        return best.tokens[known:], best.logprobs, best.queries

    def _limit(self, logits: np.ndarray, tokens: Sequence[int], wish: Options) -> None:
        """Excludes tokens that may not follow the tokens of a text."""
        logits[self._suppressed("suppress_tokens")] = -np.inf
        if not tokens:
            logits[self._suppressed("begin_suppress_tokens")] = -np.inf
        if wish.timestamps:
            self._limit_times(logits, tokens)

    def _limit_times(self, logits: np.ndarray, tokens: Sequence[int]) -> None:
        """Applies Whisper's rules for timestamps (Radford et al., section 4.5): they come in pairs except for the last, never
        decrease, and begin the text; they win if together they are likelier than any other token."""
        first = self._settings.no_timestamps_token_id + 1
        logits[first - 1] = -np.inf
        is_last, is_pair = (bool(tokens) and tokens[-1] >= first), len(tokens) < 2 or tokens[-2] >= first
        if is_last and is_pair:
            logits[first:] = -np.inf
        elif is_last:
            logits[: self._settings.eos_token_id] = -np.inf
        times = [token for token in tokens if token >= first]
        if times:
            logits[first : times[-1] + (0 if is_last and not is_pair else 1)] = -np.inf
        if not tokens:
            logits[:first] = -np.inf
            latest = getattr(self._settings, "max_initial_timestamp_index", None)
            if latest is not None:
                logits[first + latest + 1 :] = -np.inf
        most = logits[first:].max()
        if most > -np.inf and most + np.log(np.exp(logits[first:] - most).sum()) > logits[:first].max():
            logits[:first] = -np.inf


def _complete(settings: Any, tokens: dict[str, int]) -> None:
    """Completes generation settings, which fine-tuned models often lack, from the tokenizer's special tokens: languages come
    after the token that begins a text and before the tasks."""
    found: dict[str, Any] = {
        "no_timestamps_token_id": tokens.get("<|notimestamps|>"),
        "decoder_start_token_id": tokens.get("<|startoftranscript|>"),
        "prev_sot_token_id": tokens.get("<|startofprev|>"),
        "lang_to_id": {},
        "task_to_id": {},
    }
    tasks = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in tokens}
    if len(tasks) == 2 and getattr(settings, "is_multilingual", True):
        first, last = found["decoder_start_token_id"] or 0, min(tasks.values())
        found["lang_to_id"] = {name: token for name, token in tokens.items() if first < token < last}
        found["task_to_id"] = tasks
    for name, value in found.items():
        if not getattr(settings, name, None):
            setattr(settings, name, value)


def segments_of(tokens: list[int], first: int, frames: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """The segments of a window, each with begin, end and tokens, and the number of frames that the window has used.

    Two adjacent timestamps end a segment and begin the next. What follows the last such pair is unfinished and is heard again
    in the next window, unless a single timestamp ends the text, which means that there is no speech after it.

    Args:
        tokens: the tokens of the window.
        first: the timestamp token of the window's begin; later ones have larger ids.
        frames: the frames of the window.
    """
    is_time = [token >= first for token in tokens]
    cuts = [number for number in range(1, len(tokens)) if is_time[number - 1] and is_time[number]]
    whole = is_time[-2:] == [False, True]
    if not cuts:
        times = [token - first for token in tokens if token >= first]
        end = times[-1] if times and times[-1] > 0 else frames // _FRAMES_PER_POSITION
        return ([(0, end, tokens)] if tokens else []), frames
    ends = [*cuts, len(tokens)] if whole else [*cuts[:-1], cuts[-1]]
    segments, begin = [], 0
    for end in ends:
        part = tokens[begin:end]
        segments.append((part[0] - first, part[-1] - first, part))
        begin = end
    return segments, frames if whole else (tokens[cuts[-1] - 1] - first) * _FRAMES_PER_POSITION


def load_transcriber(
    path: str | os.PathLike[str], quantization: LowBitConfig | None = None, *, cache: str | None = None, progress: Any = None
) -> AnyTranscriber:
    """Loads a Whisper, Moonshine or Parakeet model with its processor.

    Args:
        path: a directory with config.json, safetensors files, tokenizer.json and preprocessor_config.json, float or packed.
        quantization: how to quantize a float checkpoint while it is loaded; None: not at all.
        cache: as for :class:`SpeechDecoder`; only for Whisper models.
        progress: called as ``progress(tensors loaded, tensors)``.

    Raises:
        ImportError: transformers is not installed.
        OSError, ValueError: as :func:`lowbit.llm.loading.load_model`, or the processor's files are missing or damaged.
    """
    from ..llm.loading import load_speech_model, load_speech_processor

    directory = Path(path)
    model: Any = load_speech_model(directory, quantization, progress=progress)
    processor = load_speech_processor(directory)
    if model.config.model_type == "whisper":
        return Transcriber(model, processor, cache)
    from .pieces import MoonshineTranscriber, ParakeetTranscriber, PieceTranscriber, TransducerTranscriber

    kinds: dict[str, type[PieceTranscriber]] = {
        "moonshine": MoonshineTranscriber, "parakeet_ctc": ParakeetTranscriber, "parakeet_rnnt": TransducerTranscriber,
        "parakeet_tdt": TransducerTranscriber,
    }  # fmt: skip
    kind = kinds[model.config.model_type]
    if cache is not None:
        raise ValueError(f"cache is {cache!r}; expected None with a {kind.family} model")
    return kind(model, processor)
