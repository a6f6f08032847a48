"""llama.cpp through llama-cpp-python for tests: logits, greedy tokens and tokenization."""

import ctypes
import os

import numpy as np
import pytest

_F32 = 0  # of ggml's types


def find_library():
    """The module llama_cpp. If it is not installed, the test is skipped with the reason, or fails under `make
    test-llama-cpp`."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"llama-cpp-python is not installed or does not load ({error}): make test-llama-cpp"
        (pytest.fail if os.environ.get("LOWBIT_LLAMA_CPP") else pytest.skip)(reason)
    return llama_cpp


class LlamaCpp:
    """A GGUF file, loaded by llama.cpp with one thread and float32 caches."""

    def __init__(self, library, path, length: int = 64):
        self._library = library
        self._silent = library.llama_log_callback(lambda level, text, data: None)
        library.llama_log_set(self._silent, ctypes.c_void_p(0))
        library.llama_backend_init()
        parameters = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocabulary = library.llama_model_get_vocab(self._model)
        settings = library.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = length
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = _F32
        settings.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it multiplies in float16
        self._context = library.llama_init_from_model(self._model, settings)
        assert self._context, f"llama.cpp makes no context for {path}"

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Appends tokens to those of earlier calls; returns the logits after the last, float32 [vocabulary]."""
        array = (self._library.llama_token * len(tokens))(*tokens)
        assert self._library.llama_decode(self._context, self._library.llama_batch_get_one(array, len(tokens))) == 0
        count = self._library.llama_vocab_n_tokens(self._vocabulary)
        return np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, -1), (count,)).copy()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Greedy tokens after a prompt."""
        found = [int(self.logits(tokens).argmax())]
        while len(found) < count:
            found.append(int(self.logits(found[-1:]).argmax()))
        return found

    def tokenize(self, text: str) -> list[int]:
        """Tokenizes like transformers: adds the tokens around a text, and parses names of special tokens."""
        data, room = text.encode(), 4 * len(text) + 8
        tokens = (self._library.llama_token * room)()
        count = self._library.llama_tokenize(self._vocabulary, data, len(data), tokens, room, True, True)
        assert count >= 0
        return list(tokens[:count])
