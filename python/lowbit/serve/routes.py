"""The server's endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.applications import Starlette
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from . import messages
from .answers import Answers, ChatForm, Event, Form, failure
from .constraints import Matcher, make_constraint
from .dialects import TOKENS
from .embeddings import Batches, TextModel, embeddings, ranking, refuse_to_write
from .embeddings import Request as Rows
from .engine import Engine, shutting_down
from .errors import ApiError, bad, shortened
from .events import Events, deltas, reported, unless_gone
from .limits import Limits
from .messages import CountTokens, Messages, MessagesForm
from .metrics import Metrics
from .model_list import LanguageModel, decoded
from .page import HEADERS, PAGE
from .pictures import PictureModel, Pictures, refuse_pictures
from .protocol import (
    MOST_TOKENS,
    B,
    Body,
    Chat,
    Completion,
    Conversation,
    Detokenize,
    Embeddings,
    Grammar,
    Ranking,
    Tokenize,
    Writing,
    check_bytes,
    parse,
    validated,
)
from .responses import Responses, ResponsesForm, Store, answered
from .speech import MEDIA_TYPES, Listening, SpeechModel, Wish, read_recording, refuse_recording
from .tools import Tools, read_tools

Model: TypeAlias = LanguageModel | TextModel | SpeechModel
_USUAL_TOKENS = 16  # default of completions, as in OpenAI's API
_CHARSETS = ("utf-8", "utf8", "us-ascii", "iso-8859-1", "latin-1")  # of forms
_OPEN = ("/", "/health")  # need no key


class Server:
    """The models, the engine that runs them, and the endpoints."""

    def __init__(self, models: Sequence[Model], limits: Limits):
        self.models = {model.name: model for model in models}
        self.limits = limits
        batches = [model.batch for model in models if isinstance(model, LanguageModel)]
        self.engine = Engine(batches, limits.waiting)
        self._batches = {model.name: Batches(model, self.engine) for model in models if isinstance(model, TextModel)}
        # One at a time, because tokenizers are not thread-safe.
        self._reader = ThreadPoolExecutor(1, "lowbit-reader")
        self._parser = ThreadPoolExecutor(1, "lowbit-parser")
        self._compiler = ThreadPoolExecutor(2, "lowbit-grammars")
        self._busy = 0  # requests without a complete response
        self._bodies: dict[asyncio.Timeout, None] = {}  # bodies being received, in order of their start
        self._times: set[asyncio.Timeout] = set()  # timeouts that expire when the server shuts down
        self._ending = False
        self._stored = Store(limits.stored_bytes)
        self._recordings = asyncio.Semaphore(limits.recordings)
        self._pictures = Pictures(limits, self.engine, self._read)
        self.metrics = Metrics(
            {
                "running_texts": ("Running texts.", lambda: self.engine.running),
                "waiting_texts": ("Texts waiting for a slot.", lambda: self.engine.waiting),
                "waiting_inputs": (
                    "Texts waiting for their embedding or score.",
                    lambda: sum(b.waiting for b in self._batches.values()),
                ),
                "prefix_cache_bytes": ("Bytes of keys and values of ended texts.", lambda: sum(b.kept_bytes for b in batches)),
            }
        )

    def app(self) -> Starlette:
        """The ASGI application."""

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            try:
                yield
            finally:
                await asyncio.to_thread(self.engine.stop)
                for each in (self._reader, self._parser, self._compiler):
                    each.shutdown(cancel_futures=True)
                self._pictures.close()

        posts: dict[str, tuple[Callable[[Any], Awaitable[Response]], type[Body]]] = {
            "/v1/chat/completions": (self._chat, Chat), "/v1/completions": (self._complete, Completion),
            "/v1/messages": (self._messages, Messages), "/v1/messages/count_tokens": (self._count_tokens, CountTokens),
            "/v1/responses": (self._respond, Responses),
            "/v1/embeddings": (self._embed, Embeddings), "/v1/rerank": (self._rerank, Ranking),
            "/v2/rerank": (self._rerank, Ranking), "/tokenize": (self._tokenize, Tokenize),
            "/detokenize": (self._detokenize, Detokenize),
        }  # fmt: skip
        forms = {
            "/v1/audio/transcriptions": partial(self._listen, "transcribe"),
            "/v1/audio/translations": partial(self._listen, "translate"),
        }
        gets = {
            "/": self._page, "/health": self._health, "/metrics": self._metrics, "/v1/models": self._models,
            "/v1/models/{name:path}": self._model_card,
        }  # fmt: skip
        routes = [Route(path, self._guarded(path, self._reading(*each)), methods=["POST"]) for path, each in posts.items()]
        routes += [Route(path, self._guarded(path, handler), methods=["POST"]) for path, handler in forms.items()]
        routes += [Route(path, self._guarded(path, handler), methods=["GET"]) for path, handler in gets.items()]
        path = "/v1/responses/{name}"
        routes.append(Route(path, self._guarded(path, self._response), methods=["GET", "DELETE"]))
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_endpoint})
        if self.limits.origins:
            methods, headers = ["GET", "POST", "DELETE"], ["Retry-After"]
            app.add_middleware(
                _Origins,
                allow_origins=self.limits.origins,
                allow_methods=methods,
                allow_headers=["*"],
                expose_headers=headers,
                allow_private_network=True,
            )
        app.router.redirect_slashes = False  # a redirection is not in OpenAI's format
        return app

    def end(self) -> None:
        """Answers all open requests with an error. Call it on the server's thread."""
        self._ending = True
        self.engine.end()
        for limit in self._times:
            _expire(limit)

    @contextlib.asynccontextmanager
    async def _time(self, seconds: float | None = None) -> AsyncIterator[None]:
        """A time limit that raises ApiError, also when the server shuts down."""
        limit = asyncio.timeout(0 if self._ending else seconds)
        try:
            async with limit:
                self._times.add(limit)
                try:
                    yield
                finally:
                    self._times.discard(limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise (shutting_down() if self._ending else failure(error)) from error

    def _guarded(self, path: str, handler: Callable[[Request], Awaitable[Response]]):
        async def handle(request: Request) -> Response:
            try:
                self._admit(request, path)
                self._busy += 1
                response = None
                try:
                    async with self._time():
                        response = await handler(request)
                finally:
                    if isinstance(response, Events):
                        response.on_sent, response.refusal = self._sent, _refusal(path)
                    else:
                        self._busy -= 1
            except ClientDisconnect:
                self.metrics.canceled.inc()
                return Response(status_code=499)
            except Exception as error:
                found = reported(error)
                response = JSONResponse(_refusal(path)(found), found.status, found.headers)
            self.metrics.requests.labels(path, response.status_code).inc()
            return response

        return handle

    def _sent(self) -> None:
        self._busy -= 1

    def _reading(self, handler: Callable[[Any], Awaitable[Response]], kind: type[Body]):
        """Makes a request handler from a handler of bodies; it ends when the client disconnects."""

        async def handle(request: Request) -> Response:
            asked = await self._body(request, kind)
            async with self._within():
                found: Response = await unless_gone(request.receive, handler(asked))
                return found

        return handle

    def _admit(self, request: Request, path: str) -> None:
        """Raises ApiError for a request that is not allowed."""
        host = request.headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.limits.hosts is not None and name.lower() not in self.limits.hosts:
            # DNS rebinding: a page of another site whose name now points here.
            raise ApiError(403, f"the host is {name!r}; expected one of {', '.join(self.limits.hosts)}", code="wrong_host")
        origin = request.headers.get("origin")
        allowed = self.limits.origins
        if origin is not None and origin.partition("://")[2].lower() != host.lower() and not {origin, "*"} & set(allowed):
            raise _wrong_origin(origin, allowed)
        if self._busy >= self.limits.requests and path not in _OPEN:
            if not self._bodies:
                raise self._crowded()
            # Evict a request with an incomplete body, so that slow bodies cannot block others.
            slowest = next(iter(self._bodies))
            del self._bodies[slowest]
            _expire(slowest)
        if self.limits.api_key is None or path in _OPEN:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if kind.lower() == "bearer" else request.headers.get("x-api-key", "")  # Anthropic's header
        if not hmac.compare_digest(key.encode(), self.limits.api_key.encode()):
            found = "another one" if key else "none"
            raise ApiError(401, f"an API key is needed, and the request has {found}", code="invalid_api_key")

    def _crowded(self) -> ApiError:
        message = f"{self._busy} requests are open; expected at most {self.limits.requests}: send the request again later"
        return ApiError(503, message, code="too_many_requests", retry_after=1)

    @contextlib.asynccontextmanager
    async def _arriving(self, request: Request, most: int) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Yields the pieces of a body, which must arrive at a minimum rate.

        Raises:
            ApiError: the body is too large or too slow, or was evicted for another request.
        """
        began, limits = asyncio.get_running_loop().time(), self.limits
        limit = asyncio.timeout(min(limits.timeout, limits.body_seconds))

        async def pieces() -> AsyncGenerator[bytes]:
            count = 0
            async for piece in request.stream():
                count += len(piece)
                if count > most:
                    raise ApiError(413, f"the body has more than {most} bytes; expected fewer")
                limit.reschedule(began + min(limits.timeout, limits.body_seconds + count / limits.body_rate))
                yield piece

        try:
            async with limit:
                self._bodies[limit] = None
                yield pieces()
        except TimeoutError as error:
            if not limit.expired():
                raise
            if limit not in self._bodies:
                raise self._crowded() from error
            raise ApiError(408, f"the body is not complete after {(limit.when() or 0) - began:.3g} seconds") from error
        finally:
            self._bodies.pop(limit, None)

    async def _body(self, request: Request, kind: type[B]) -> B:
        data = bytearray()
        async with self._arriving(request, self.limits.body_bytes) as pieces:
            async for piece in pieces:
                data += piece
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, kind, bytes(data))

    def _model(self, asked: Body) -> Model:
        if asked.model is None:
            if len(self.models) == 1:
                return next(iter(self.models.values()))
            raise bad("model", f"model is missing; expected one of {', '.join(self.models)}")
        return self._named(asked.model)

    def _named(self, name: str) -> Model:
        if name not in self.models:
            raise ApiError(
                404,
                f"there is no model {shortened(name, 64)!r}; expected {' or '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    def _writer(self, asked: Body) -> LanguageModel:
        model = self._model(asked)
        if not isinstance(model, LanguageModel):
            raise refuse_to_write(model)
        return model

    def _tokenizing(self, asked: Body) -> LanguageModel | TextModel:
        model = self._model(asked)
        if isinstance(model, SpeechModel):
            raise refuse_to_write(model)
        return model

    async def _read(self, function: Callable, *arguments: Any) -> Any:
        """Runs tokenization on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, function, *arguments)

    async def _conversation(self, model: LanguageModel, asked: Conversation, tools: Tools | None = None) -> list[int]:
        """The tokens of a conversation."""
        asked.check_bytes(model.max_length)
        documents = None if tools is None else tools.documents
        return await self._pictures.prompt(model, asked, documents)

    async def _chat(self, asked: Chat, kind: Callable[[Answers, LanguageModel, Tools | None], Form] = ChatForm) -> Response:
        model, tools = self._writer(asked), read_tools(asked)
        tokens = await self._conversation(model, asked, tools)
        model.check_prompt(tokens, "messages")
        grammar = None
        if tools is not None and asked.structured_outputs is None:
            grammar = tools.grammar(asked.schema_text, model)
        elif tools is not None and tools.forced:
            raise bad("tool_choice", "tool_choice asks for a call beside structured_outputs; expected one of the two")
        elif tools is not None and tools.strict:
            raise bad("tools", "tools has a strict function beside structured_outputs; expected one of the two")
        return await self._write(asked, model, [tokens], kind, None, grammar or asked.grammar, tools)

    async def _converted(self, function: Callable[..., Chat], *arguments: Any) -> Chat:
        """Converts a request of another API."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, function, *arguments)

    async def _messages(self, asked: Messages) -> Response:
        return await self._chat(await self._converted(asked.chat), MessagesForm)

    async def _count_tokens(self, asked: CountTokens) -> Response:
        chat = await self._converted(asked.chat)
        return JSONResponse({"input_tokens": len(await self._conversation(self._writer(chat), chat, read_tools(chat)))})

    async def _respond(self, asked: Responses) -> Response:
        name = asked.previous_response_id
        before = [] if name is None else from_json(self._stored.messages(name))
        chat = await self._converted(asked.chat, before)

        def keep(response: dict[str, Any]) -> None:
            if asked.store:
                self._stored.add(response, [*before, *asked.messages(before), answered(response)])

        return await self._chat(chat, partial(ResponsesForm, asked, keep))

    async def _response(self, request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            self._stored.remove(name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return Response(self._stored.document(name), media_type="application/json")

    async def _complete(self, asked: Completion) -> Response:
        model = self._writer(asked)
        tokens, many = [], len(asked.prompt) > 1
        for number, each in enumerate(asked.prompt):
            name = f"prompt[{number}]" if many else "prompt"
            if isinstance(each, str):
                check_bytes(name, [each], model.max_length)
            tokens.append(await self._read(model.encode, each) if isinstance(each, str) else each)
            model.check_prompt(tokens[-1], name)
        return await self._write(asked, model, tokens, Form, _USUAL_TOKENS, asked.grammar)

    async def _write(
        self,
        asked: Writing,
        model: LanguageModel,
        tokens: list[list[int]],
        kind: Callable[[Answers, LanguageModel, Tools | None], Form],
        most: int | None,
        grammar: Grammar | None,
        tools: Tools | None = None,
    ) -> Response:
        if asked.n * len(tokens) > self.limits.texts:
            raise bad("n", f"n is {asked.n}; expected at most {self.limits.texts} texts, n of each prompt")
        if asked.sampling(model.usual).dry_multiplier:
            await self._read(model.breakers, asked)
        answers = Answers(self.engine, model, tokens, asked, most, () if tools is None else TOKENS)
        if grammar is not None:
            loop = asyncio.get_running_loop()
            constraint: Matcher = await loop.run_in_executor(self._compiler, make_constraint, model, grammar)
            for text in answers.texts:
                text.constraint = constraint.copy()
        form = kind(answers, model, tools)
        answers.start()
        if asked.stream:
            return Events(self._stream(answers, form), self._within, self.metrics.canceled.inc, answers.close, form)
        pieces: dict[int, list[Event]] = {index: [] for index in range(len(answers.texts))}
        try:
            async for event in answers.events():
                pieces[event.index].append(event)
        finally:
            answers.close()
        self._count(answers)
        return JSONResponse(form.whole(pieces))

    async def _stream(self, answers: Answers, form: Form) -> AsyncIterator[dict | ApiError]:
        begun: set[int] = set()
        try:
            async for event in answers.events():
                if not begun:
                    for chunk in form.first():
                        yield chunk
                for chunk in form.next(event, event.index not in begun):
                    yield chunk
                begun.add(event.index)
            for chunk in form.last():
                yield chunk
            self._count(answers)
        except Exception as error:
            yield reported(error)

    def _within(self) -> contextlib.AbstractAsyncContextManager[None]:
        return self._time(self.limits.timeout)

    def _count(self, answers: Answers) -> None:
        usage, metrics = answers.usage, self.metrics
        metrics.prompt_tokens.inc(usage["prompt_tokens"])
        metrics.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        metrics.new_tokens.inc(usage["completion_tokens"])
        metrics.guessed.inc(sum(each.guessed for each in answers.ends.values()))
        metrics.accepted.inc(sum(each.accepted for each in answers.ends.values()))
        metrics.whole.observe(time.perf_counter() - answers.began)
        if answers.first is not None:
            metrics.first.observe(answers.first - answers.began)

    async def _embed(self, asked: Embeddings) -> Response:
        return await self._compute(embeddings(self._model(asked), asked))

    async def _rerank(self, asked: Ranking) -> Response:
        return await self._compute(ranking(self._model(asked), asked))

    async def _compute(self, rows: Rows) -> Response:
        began = time.perf_counter()
        counts: list[int] = []
        for some in rows.counts():  # other requests run in between
            counts += await self._read(some)
        found = await asyncio.wrap_future(self._batches[rows.model.name].add(rows.items, counts))
        self.metrics.prompt_tokens.inc(sum(counts))
        self.metrics.whole.observe(time.perf_counter() - began)
        return await asyncio.to_thread(lambda: JSONResponse(rows.document(found, sum(counts))))

    async def _form(self, request: Request) -> tuple[Wish, UploadFile]:
        """Parses parameters and the file of a form; bytes after the first megabyte are on the disk."""
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("multipart/form-data"):
            raise ApiError(400, f"the body is {kind or 'of no type'}; expected multipart/form-data with a file")
        charset = parse_options_header(kind)[1].get(b"charset", b"utf-8").decode("latin-1").lower()
        if charset not in _CHARSETS:
            # Python has further ones (punycode, idna) that take quadratic time, here on the server's thread.
            raise ApiError(400, f"the body is not a readable form: its charset is {shortened(charset, 40)!r}; expected utf-8")
        try:
            async with self._arriving(request, self.limits.recording_bytes) as pieces:
                form = await MultiPartParser(request.headers, pieces, max_files=1, max_fields=32).parse()
        except (MultiPartException, ValueError) as error:  # ValueError: bytes that are invalid in the charset
            raise ApiError(400, f"the body is not a readable form: {error}") from error
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise bad("file", f"file is {'missing' if file is None else 'a text'}; expected a recording")
            values: dict[str, Any] = {name: form.getlist(name) for name in form if name != "file"}
            for name, each in values.items():
                if len(each) > 1 and not name.endswith("[]"):
                    raise bad(name, f"{name} comes {len(each)} times; expected once")
            return validated(Wish, {k: v if k.endswith("[]") else v[0] for k, v in values.items()}), file
        except ApiError:
            await form.close()
            raise

    async def _listen(self, task: str, request: Request) -> Response:
        began = time.perf_counter()
        wish, file = await self._form(request)
        model = self._model(wish)
        if not isinstance(model, SpeechModel):
            raise refuse_recording(model)

        async def hear(tell: Callable[[str], None]) -> Listening:
            """Transcribes one window at a time; other models run in between."""
            try:
                async with asyncio.timeout(self.limits.timeout), self._recordings:
                    reading = read_recording(await file.read(), file.filename or "file")
                    listening = await asyncio.to_thread(Listening, model, await reading, wish, task)
                    while (segments := await asyncio.wrap_future(self.engine.call(listening.next))) is not None:
                        for segment in segments:
                            tell(segment.text)
            finally:
                await file.close()
            self.metrics.whole.observe(time.perf_counter() - began)
            return listening

        if wish.stream:
            return Events(deltas(hear), self._within, self.metrics.canceled.inc, lambda: None)
        listening: Listening = await unless_gone(request.receive, hear(lambda text: None))
        if (kind := MEDIA_TYPES.get(wish.response_format)) is not None:
            return PlainTextResponse(listening.subtitles(), media_type=kind)
        return JSONResponse(listening.document())

    async def _tokenize(self, asked: Tokenize) -> Response:
        model = self._tokenizing(asked)
        if asked.messages:
            if not isinstance(model, LanguageModel):
                raise bad("messages", f"the model {model.name} has no conversations; expected content, or prompt")
            refuse_pictures(asked)
            tokens = await self._conversation(model, asked)
        else:
            text = asked.prompt if asked.content is None else asked.content
            if text is None:
                raise bad("content", "content is missing; expected a text (prompt is the same), or messages")
            check_bytes("content", [text], model.max_length)
            tokens = await self._read(model.encode, text)
        return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def _detokenize(self, asked: Detokenize) -> Response:
        model, tokens = self._tokenizing(asked), asked.tokens
        size, most = len(model.tokenizer), max(MOST_TOKENS, model.max_length or 0)
        if len(tokens) > most:
            raise bad("tokens", f"tokens has {len(tokens)} ids; expected at most {most}")
        if max(tokens, default=0) >= size:
            raise bad("tokens", f"tokens has {max(tokens)}; expected token ids from 0 to {size - 1}")
        text = await self._read(decoded, model.tokenizer, tokens, True)
        return JSONResponse({"content": text, "prompt": text})

    async def _models(self, request: Request) -> Response:
        cards = [_card(model) for model in self.models.values()]
        if "anthropic-version" not in request.headers:
            return JSONResponse({"object": "list", "data": cards})
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return JSONResponse({"data": [messages.card(each) for each in cards], **ends})

    async def _model_card(self, request: Request) -> Response:
        card = _card(self._named(request.path_params["name"]))
        return JSONResponse(messages.card(card) if "anthropic-version" in request.headers else card)

    async def _health(self, request: Request) -> Response:
        if not self.engine.alive:
            raise ApiError(503, "the engine has stopped", code="unhealthy")
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)


class _Origins(CORSMiddleware):
    """Allows pages of other sites."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        asked = request_headers["access-control-request-method"]
        if asked not in self.allow_methods:
            found = ApiError(
                405, f"the method is {asked}; expected {' or '.join(self.allow_methods)}", code="method_not_allowed"
            )
        else:
            found = _wrong_origin(request_headers["origin"], self.allow_origins)
        return JSONResponse(found.document, found.status)


def _wrong_origin(origin: str, allowed: Iterable[str]) -> ApiError:
    expected = " or ".join(["one of this server", *allowed])
    return ApiError(403, f"the request comes from a page of {origin}; expected {expected}", code="wrong_origin")


def _refusal(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """Makes the JSON body of an error in the format of a path's API."""
    return messages.refusal if path.startswith("/v1/messages") else lambda error: error.document


def _expire(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


def _card(model: Model) -> dict[str, Any]:
    card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "lowbit"}
    card |= {"max_model_len": model.max_length}
    if isinstance(model, SpeechModel):
        return card | {"recordings": True}
    if not isinstance(model, LanguageModel):
        return card
    parent = {} if model.parent is None else {"parent": model.parent}
    # The page lists only models with "chat".
    return card | {"chat": model.template is not None, "pictures": isinstance(model, PictureModel), **parent}


async def _no_endpoint(request: Request, error: Exception) -> Response:
    """The error for an unknown path, or for a method that the path does not have."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["raw_path"].decode("latin-1"), error.headers or {}
    if error.status_code == 405:
        methods = " or ".join(sorted(headers["Allow"].split(", ")))
        found = ApiError(405, f"the method is {request.method}; {path} expects {methods}", code="method_not_allowed")
    else:
        message = f"there is no {request.method} {path}; docs/serving.md lists the endpoints"
        found = ApiError(error.status_code, message, code="not_found")
    return JSONResponse(_refusal(path)(found), found.status, headers)
