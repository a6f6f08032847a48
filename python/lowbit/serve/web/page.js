"use strict";
const by = id => document.getElementById(id);
const touch = matchMedia("(pointer: coarse)").matches;  // a keyboard on the screen has no Shift+Enter
let conversation = [];  // messages
let attached = [];  // elements of the next message: images with data URLs, and recordings
let listener = null;  // the model that transcribes recordings
let running = null;  // the AbortController of the answer that is being written

function headers(type = { "Content-Type": "application/json" }) {
  const key = by("key").value;
  return { ...type, ...(key && { Authorization: `Bearer ${key}` }) };
}

function show(kind, text = "") {
  const box = element("div", [text], { className: kind });
  by("log").append(box);
  return box;
}

async function failure(response) {
  if (response.status === 401) by("locked").hidden = false;
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `HTTP ${response.status}`);
}

async function list() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw await failure(response);
    const { data } = await response.json();
    by("model").replaceChildren(...data.filter(card => "chat" in card).map(card => {
      const option = new Option(card.chat ? card.id : `${card.id} (continues texts)`, card.id);
      option.dataset.chat = card.chat;
      option.dataset.images = card.images;
      return option;
    }));
    listener = data.find(card => card.recordings)?.id ?? null;
    offer();
    document.querySelectorAll(".error").forEach(box => box.remove());
    if (!by("model").options.length && !listener) show("error", "This server has no language model.");
  } catch (error) { show("error", error.message); }
}

// The documents of a stream of events.
async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader();;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    rest += decoder.decode(value, { stream: true });
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const data = rest.slice(0, end).replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function busy(controller) {
  running = controller;
  by("send").disabled = running !== null;
  by("stop").disabled = running === null;
}

// What stands below an answer: why it was cut, if it was, and how fast it was written.
function notes(box, { reason, problem, usage, seconds, most }) {
  const tokens = usage?.completion_tokens;
  if (problem?.name === "AbortError") box.append(element("div", ["Stopped."], { className: "cut" }));
  else if (problem) box.append(element("div", [`Cut off by an error: ${problem.message}`], { className: "cut" }));
  else if (reason === "length") {
    const why = tokens < most ? "the model's context is full" : `it has ${most} tokens, the most that the settings allow`;
    box.append(element("div", [`Cut off: ${why}.`], { className: "cut" }));
  }
  if (tokens !== undefined) {
    const rate = seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    box.append(element("div", [`${tokens} ${tokens === 1 ? "token" : "tokens"}${rate}`], { className: "note" }));
  }
}

// Images and recordings of the next message.

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];  // that the server reads
const LARGE = 1 << 20, PIXELS = 1 << 21;  // a larger file is scaled down to so many pixels, because each turn sends it again

const sees = () => by("model").selectedOptions[0]?.dataset.images === "true";

// Shows what can be attached.
function offer() {
  by("files").accept = [...(sees() ? ["image/*"] : []), ...(listener ? ["audio/*", "video/*"] : [])].join();
  by("attach").hidden = !by("files").accept;
  by("attached").replaceChildren(...attached.map(item => {
    if (item.tagName === "AUDIO") return item;
    const button = element("button", [item], { type: "button", title: "Remove this image" });
    button.addEventListener("click", () => { attached = attached.filter(each => each !== item); offer(); });
    return button;
  }));
  by("attached").hidden = !attached.length;
}

function dataUrl(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });
}

async function imageUrl(file) {
  if (KINDS.includes(file.type) && file.size <= LARGE) return dataUrl(file);
  const image = await createImageBitmap(file);
  const scale = Math.min(1, Math.sqrt(PIXELS / (image.width * image.height)));
  const canvas = element("canvas", [], {
    width: Math.max(1, Math.round(image.width * scale)), height: Math.max(1, Math.round(image.height * scale)),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";  // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

// The text of a recording becomes part of the message, where it can be corrected.
async function listen(file) {
  const form = new FormData();
  form.append("model", listener);
  form.append("file", file);
  const response = await fetch("/v1/audio/transcriptions", { method: "POST", headers: headers({}), body: form });
  if (!response.ok) throw await failure(response);
  const { text } = await response.json(), before = by("text").value;
  by("text").value = before && !/\s$/.test(before) ? `${before} ${text}` : before + text;
}

async function attach(files) {
  document.querySelectorAll(".error").forEach(box => box.remove());
  for (const file of files) {
    const sound = /^(audio|video)\//.test(file.type);
    if (sound ? !listener : !sees()) {
      show("error", `${file.name}: ${sound ? "this server has no speech model" : "this model takes no images"}.`);
      continue;
    }
    try {
      const item = sound ? element("audio", [], { controls: true, src: URL.createObjectURL(file) })
        : element("img", [], { src: await imageUrl(file), alt: file.name });
      attached.push(item);
      offer();
      if (sound) await listen(file);
    } catch (error) { show("error", `${file.name}: ${error.message}`); }
  }
}

async function ask(text) {
  const option = by("model").selectedOptions[0];
  const chat = option.dataset.chat === "true", most = Number(by("tokens").value) || 512, system = by("system").value.trim();
  // A new conversation replaces these, so that nothing of this answer can get into it.
  const messages = conversation, controller = new AbortController();
  document.querySelectorAll(".error").forEach(box => box.remove());
  const items = attached, images = items.filter(item => item.tagName === "IMG");
  attached = [];
  offer();
  const parts = images.map(item => ({ type: "image_url", image_url: { url: item.src } }));
  messages.push({ role: "user", content: parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text });
  const question = show("user", text), box = show("assistant waiting");
  question.prepend(...items);
  const shown = box.appendChild(element("div", [], { className: "text" })), markdown = new Markdown(shown);
  const body = { model: option.value, stream: true, stream_options: { include_usage: true }, max_tokens: most };
  if (by("temperature").value !== "") body.temperature = Number(by("temperature").value);
  if (chat) body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  else body.prompt = text;
  let answer = "", reason = null, usage = null, problem = null, first = 0, last = 0, frame = 0;
  busy(controller);
  follow(true);
  try {
    const response = await fetch(chat ? "/v1/chat/completions" : "/v1/completions",
      { method: "POST", headers: headers(), body: JSON.stringify(body), signal: controller.signal });
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      reason = choice?.finish_reason ?? reason;
      const piece = (chat ? choice?.delta?.content : choice?.text) ?? "";
      if (!piece) continue;
      answer += piece;
      last = performance.now();
      first ||= last;
      frame ||= requestAnimationFrame(() => { frame = 0; markdown.draw(answer); });
    }
  } catch (error) { problem = error; }
  cancelAnimationFrame(frame);
  if (running === controller) busy(null);
  if (messages !== conversation) return;
  box.classList.remove("waiting");
  if (answer || !problem) {
    // What there is of an answer stays.
    messages.push({ role: "assistant", content: answer });
    markdown.finish(answer);
    notes(box, { reason, problem, usage, seconds: (last - first) / 1000, most });
  } else {
    // Without an answer the message is taken back.
    messages.pop();
    question.remove();
    box.remove();
    by("text").value ||= text;
    attached = [...items, ...attached];
    offer();
    if (problem.name !== "AbortError") show("error", problem.message);
  }
}

// The end of the log stays in view while it grows and while the window changes, unless the reader has scrolled up.
let following = true, before = 0;
function follow(again) {
  const view = document.querySelector("main");
  following ||= again;
  if (following) view.scrollTop = view.scrollHeight;
  before = view.scrollTop;
}
document.querySelector("main").addEventListener("scroll", ({ target }) => {
  if (target.scrollHeight - target.scrollTop - target.clientHeight < 32) following = true;
  else if (target.scrollTop < before) following = false;
  before = target.scrollTop;
});
const watch = new ResizeObserver(() => follow(false));
watch.observe(by("log"));
watch.observe(document.querySelector("main"));

by("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = by("text").value;
  if (!(text.trim() || attached.some(item => item.tagName === "IMG")) || running) return;
  if (!by("model").selectedOptions.length) return;
  by("text").value = "";
  ask(text);
});
if (!touch) by("text").placeholder = "Message (Enter sends, Shift+Enter adds a line)";
by("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch) return;
  event.preventDefault();
  by("form").requestSubmit();
});
by("model").addEventListener("change", offer);
by("attach").addEventListener("click", () => by("files").click());
by("files").addEventListener("change", ({ target }) => {
  const files = [...target.files];
  target.value = "";  // so that the same file can be chosen again
  attach(files);
});
by("text").addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (!files.length || by("attach").hidden) return;
  event.preventDefault();
  attach(files);
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  event.preventDefault();  // otherwise the browser opens the file in the place of the page
  attach([...event.dataTransfer.files]);
});
by("stop").addEventListener("click", () => running?.abort());
by("new").addEventListener("click", () => {
  running?.abort();
  busy(null);
  conversation = [];
  attached = [];
  offer();
  by("log").replaceChildren();
  follow(true);
});
by("key").addEventListener("change", list);
list();
