"""The server's endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar

from prometheus_client import generate_latest
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from . import messages
from .answers import Answers, ChatForm, Event, Form
from .bodies import Body, check_bytes, parse
from .constraints import Matcher, make_constraint
from .dialects import TOKENS
from .embeddings import Batches, TextModel, embeddings, ranking, refuse_to_write
from .embeddings import Request as Rows
from .engine import Engine
from .errors import ApiError, bad, shortened
from .events import Events, deltas, reported, unless_gone
from .forms import read_form
from .gate import Gate, Origins, no_endpoint
from .image_conversations import ImageModel, Images, refuse_images
from .limits import Limits
from .messages import CountTokens, Messages, MessagesForm
from .metrics import Metrics
from .model_list import LanguageModel, decoded
from .page import HEADERS, PAGE
from .protocol import MOST_TOKENS, Chat, Completion, Conversation, Detokenize, Embeddings, Grammar, Ranking, Tokenize, Writing
from .responses import Responses, ResponsesForm, Store, answered
from .speech import MEDIA_TYPES, Listening, SpeechModel, read_recording, refuse_recording
from .tools import Tools, read_tools

Model: TypeAlias = LanguageModel | TextModel | SpeechModel
T = TypeVar("T")
_USUAL_TOKENS = 16  # default of completions, as in OpenAI's API


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
        self._stored = Store(limits.stored_bytes)
        self._recordings = asyncio.Semaphore(limits.recordings)
        self._images = Images(limits, self.engine, self._read)
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
        self.gate = Gate(limits, self.metrics)

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
                self._images.close()

        posts: dict[str, tuple[Callable[[Any], Awaitable[Response]], type[Body]]] = {
            "/v1/chat/completions": (self._chat, Chat), "/v1/completions": (self._complete, Completion),
            "/v1/messages": (self._messages, Messages), "/v1/messages/count_tokens": (self._count_tokens, CountTokens),
            "/v1/responses": (self._respond, Responses),
            "/v1/embeddings": (self._embed, Embeddings), "/v1/rerank": (self._rerank, Ranking),
            "/v2/rerank": (self._rerank, Ranking), "/rerank": (self._rerank, Ranking), "/tokenize": (self._tokenize, Tokenize),
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
        routes = [Route(path, self.gate.guarded(path, self._reading(*each)), methods=["POST"]) for path, each in posts.items()]
        routes += [Route(path, self.gate.guarded(path, handler), methods=["POST"]) for path, handler in forms.items()]
        routes += [Route(path, self.gate.guarded(path, handler), methods=["GET"]) for path, handler in gets.items()]
        path = "/v1/responses/{name}"
        routes.append(Route(path, self.gate.guarded(path, self._response), methods=["GET", "DELETE"]))
        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: no_endpoint})
        if self.limits.origins:
            app.add_middleware(
                Origins,
                allow_origins=self.limits.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["Retry-After"],
                allow_private_network=True,
            )
        app.router.redirect_slashes = False  # a redirection is not in OpenAI's format
        return app

    def end(self) -> None:
        """Answers all open requests with an error. Call it on the server's thread."""
        self.engine.end()
        self.gate.end()

    def _reading(self, handler: Callable[[Any], Awaitable[Response]], kind: type[Body]):
        """Makes a request handler from a handler of bodies; it ends when the client disconnects."""

        async def handle(request: Request) -> Response:
            asked = await self._parsed(parse, kind, await self.gate.body(request))
            async with self.gate.within():
                found: Response = await unless_gone(request.receive, handler(asked))
                return found

        return handle

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

    async def _parsed(self, function: Callable[..., T], *arguments: Any) -> T:
        """Parses a request, or converts one of another API, on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, function, *arguments)

    async def _conversation(self, model: LanguageModel, asked: Conversation, tools: Tools | None = None) -> list[int]:
        """The tokens of a conversation."""
        asked.check_bytes(model.max_length)
        documents = None if tools is None else tools.documents
        return await self._images.prompt(model, asked, documents)

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

    async def _messages(self, asked: Messages) -> Response:
        return await self._chat(await self._parsed(asked.chat), MessagesForm)

    async def _count_tokens(self, asked: CountTokens) -> Response:
        chat = await self._parsed(asked.chat)
        return JSONResponse({"input_tokens": len(await self._conversation(self._writer(chat), chat, read_tools(chat)))})

    async def _respond(self, asked: Responses) -> Response:
        name = asked.previous_response_id
        before = [] if name is None else from_json(self._stored.messages(name))
        chat = await self._parsed(asked.chat, before)

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
            return Events(self._stream(answers, form), self.gate.within, self.metrics.canceled.inc, answers.close, form)
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

    async def _listen(self, task: str, request: Request) -> Response:
        began = time.perf_counter()
        wish, file = await read_form(request, self.gate)
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
            return Events(deltas(hear), self.gate.within, self.metrics.canceled.inc, lambda: None)
        listening: Listening = await unless_gone(request.receive, hear(lambda text: None))
        if (kind := MEDIA_TYPES.get(wish.response_format)) is not None:
            return PlainTextResponse(listening.subtitles(), media_type=kind)
        return JSONResponse(listening.document())

    async def _tokenize(self, asked: Tokenize) -> Response:
        model = self._tokenizing(asked)
        if asked.messages:
            if not isinstance(model, LanguageModel):
                raise bad("messages", f"the model {model.name} has no conversations; expected content, or prompt")
            refuse_images(asked)
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


def _card(model: Model) -> dict[str, Any]:
    card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "lowbit"}
    card |= {"max_model_len": model.max_length}
    if isinstance(model, SpeechModel):
        return card | {"recordings": True}
    if not isinstance(model, LanguageModel):
        return card
    parent = {} if model.parent is None else {"parent": model.parent}
    # The page lists only models with "chat".
    return card | {"chat": model.template is not None, "images": isinstance(model, ImageModel), **parent}
