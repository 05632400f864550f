"use strict";

// The page's data, its state, and what its views share. A view (page.*.js) is a function that builds
// its controls in the panel and returns a function that draws a layer's numbers.

/** What the page is about: the model, the texts, a comparison, patterns; see view.py. */
const data = JSON.parse(document.getElementById("data").textContent);

const hasTexts = data.texts?.length > 0;
const hasGuesses = () => data.texts.some(({ guesses }) => Object.keys(guesses).length);

/** The views; `has` says whether there is data for it, `first` is the lowest layer that it shows. */
const VIEWS = [
  { id: "head", label: "Heads", first: 1, open: openHeads, has: () => hasTexts },
  { id: "model", label: "Model", first: 1, open: openModel, has: () => hasTexts },
  { id: "neuron", label: "Neurons", first: 1, open: openNeuron, has: () => hasTexts },
  { id: "layers", label: "Layers", first: 0, open: openLayers, has: () => hasTexts },
  { id: "masked", label: "Masked", first: 0, open: openMasked, has: () => hasTexts && hasGuesses() },
  { id: "patterns", label: "Patterns", first: 0, open: openPatterns, has: () => data.patterns },
];

/** What is chosen, as it is in the address: layers and heads count from 1, tokens from 0. */
const state = {
  view: "", text: 0, layer: 1, head: 1, heads: null, token: null, key: null, direction: "all",
  map: null,
};

// ---------------------------------------------------------------- numbers

/** Return the bytes of an element's base64 of gzip. */
async function unpack(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** Return the number of a float16's bits. */
function fromHalf(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

/** Return the numbers of a layer of a text by name, as `_layer` in view.py writes them. */
async function readLayer(text, index) {
  const { tokens, heads, headSize, hasPositionScores } = data.texts[text];
  const buffer = await unpack(`layer-${text}-${index}`), length = tokens.length;
  let offset = 0;
  const next = (Type, count) => {
    const array = new Type(buffer, offset, count);
    offset += array.byteLength;
    return array;
  };
  const halves = (count) => Float32Array.from(next(Uint16Array, count), fromHalf);
  const layer = { length, headSize, cosines: next(Int16Array, length * length) };
  if (index) {
    layer.queries = halves(heads * length * headSize);
    layer.keys = halves(heads * length * headSize);
    layer.positions = hasPositionScores ? halves(heads * length * length) : null;
    layer.maxima = halves(heads * length);
    layer.maps = next(Uint8Array, heads * length * length);
  }
  return layer;
}

/** Layers that were read, as promises by name; the one that was used longest ago is first. */
const layers = new Map();
const CACHED_LAYERS = 6;

/** Return a layer of a text, from the cache if it is there. */
function getLayer(text, index) {
  const name = `${text}-${index}`, layer = layers.get(name) ?? readLayer(text, index);
  layers.delete(name);
  layers.set(name, layer);
  if (layers.size > CACHED_LAYERS) layers.delete(layers.keys().next().value);
  return layer;
}

/** Return how much a query attends to a key by a head (counted from 1). */
function weight(layer, head, query, key) {
  const row = (head - 1) * layer.length + query;
  return (layer.maps[row * layer.length + key] * layer.maxima[row]) / 255;
}

/** Return the whole numbers from `start` up to but not `end`. */
const range = (start, end) => Array.from({ length: end - start }, (_, i) => start + i);

const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** Return a number with a minus sign that is as wide as a plus. */
const number = (x, digits = 2) => x.toFixed(digits).replace("-", "−");

// ---------------------------------------------------------------- elements

/** Return an element with attributes, "on…" listeners and children; strings are text, not markup. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Return a token or a text of any direction of writing. */
const say = (text) => h("bdi", { dir: "auto", translate: "no" }, text);

/** Return a token as it stands in a sentence. */
const quote = (token) => h("bdi", { class: "token", dir: "auto", translate: "no" }, token);

/** Return the value of a colour of page.css. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const HUES = 8;
const DASHES = [[], [5, 3], [1, 3]];

/** Return the CSS variables of a head: its hue, and its dashes after the first eight heads. */
const headStyle = (head) =>
  `--hue: var(--head-${(head - 1) % HUES}); --dash: ${["solid", "dashed", "dotted"][headRound(head)]}`;
const headRound = (head) => Math.min(2, Math.floor((head - 1) / HUES));

/** Make arrow keys, Home and End move the focus among elements; Tab enters at one of them. */
function rove(elements, { columns = 1, start = 0, onfocus = () => {} } = {}) {
  const move = (index) => {
    const target = elements[Math.min(elements.length - 1, Math.max(0, index))];
    for (const element of elements) element.tabIndex = element === target ? 0 : -1;
    return target;
  };
  move(start);
  elements.forEach((element, index) => {
    const down = columns, steps = { ArrowUp: -down, ArrowDown: down, ArrowLeft: -1, ArrowRight: 1 };
    element.addEventListener("keydown", (event) => {
      const step = steps[event.key] ?? { Home: -index, End: elements.length - 1 - index }[event.key];
      if (step === undefined || index + step < 0 || index + step >= elements.length) return;
      event.preventDefault();
      move(index + step).focus();
    });
    element.addEventListener("focus", () => onfocus(index, move(index)));
  });
}

/** Return a labelled slider over the layers from `first` on. */
function layerControl(first) {
  const name = () => (state.layer ? `Layer ${state.layer}` : "Embeddings");
  const output = h("output", {}, name());
  const slider = h("input", {
    type: "range", min: first, max: currentText().layers, value: state.layer,
    "aria-label": "Layer", "aria-valuetext": name(),
    oninput: () => {
      change({ layer: Number(slider.value) });
      output.textContent = name();
      slider.setAttribute("aria-valuetext", name());
    },
  });
  return h("label", { class: "control layer" }, slider, output);
}

/** Return buttons of which one is chosen: `options` are [value, label]s. */
function choice(label, options, chosen, onchange) {
  const buttons = options.map(([value, text]) =>
    h("button", {
      type: "button", role: "radio", "aria-checked": String(value === chosen),
      onclick: (event) => {
        for (const each of buttons) each.setAttribute("aria-checked", String(each === event.target));
        onchange(value);
      },
    }, text));
  rove(buttons, { start: Math.max(0, options.findIndex(([value]) => value === chosen)) });
  return h("div", { class: "control" },
    h("span", {}, label), h("div", { class: "choice", role: "radiogroup", "aria-label": label }, ...buttons));
}

// ---------------------------------------------------------------- state

const currentText = () => data.texts[state.text];

/** Take over what an address says, as far as it fits the data. */
function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const within = (name, first, last, otherwise) => {
    const value = Number.parseInt(fields.get(name) ?? "", 10);
    return value >= first && value <= last ? value : otherwise;
  };
  const shown = VIEWS.filter((view) => view.has());
  state.view = (shown.find((view) => view.id === fields.get("view")) ?? shown[0]).id;
  if (!hasTexts) return;
  state.text = within("text", 0, data.texts.length - 1, 0);
  const text = currentText(), last = text.tokens.length - 1;
  state.layer = within("layer", 0, text.layers, 1);
  state.head = within("head", 1, text.heads, 1);
  state.token = within("token", 0, last, null);
  state.key = within("key", 0, last, null);
  state.heads = fields.get("heads")?.split(".").map(Number) ?? null;
  state.map = within("map", 1, 1, null);
  state.direction = fields.get("direction") in DIRECTIONS ? fields.get("direction") : "all";
}

/** Write what is chosen to the address, so that a link opens the same. */
function writeAddress() {
  const fields = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== null && value !== "all") fields.set(name, Array.isArray(value) ? value.join(".") : value);
  }
  try {
    history.replaceState(null, "", `#${fields}`);
  } catch {
    // The frame of a notebook has no address of its own.
  }
}

let draw = () => {}; // of the open view
let drawings = 0;

/** Change what is chosen, and draw it. */
function change(changes) {
  const isOther = ["view", "text"].some((name) => name in changes && changes[name] !== state[name]);
  if ("text" in changes && isOther) Object.assign(state, { token: null, key: null });
  Object.assign(state, changes);
  writeAddress();
  return isOther ? openView() : drawView();
}

/** Draw the open view once its layer is read, unless something else was chosen by then. */
async function drawView() {
  const drawing = ++drawings;
  const layer = hasTexts && (await getLayer(state.text, state.layer));
  if (drawing === drawings) draw(layer);
}

/** Open the chosen view of the chosen text. */
function openView() {
  const view = VIEWS.find(({ id }) => id === state.view), panel = document.getElementById("panel");
  state.layer = Math.max(view.first, state.layer);
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.setAttribute("aria-selected", String(tab.id === `tab-${view.id}`));
  }
  for (const button of document.querySelectorAll(".texts button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.text) === state.text));
  }
  panel.setAttribute("aria-labelledby", `tab-${view.id}`);
  hideTip();
  panel.replaceChildren();
  if (hasTexts) document.getElementById("prediction").replaceChildren(...prediction());
  draw = view.open(panel);
  return drawView();
}

// ---------------------------------------------------------------- the page

/** Return the elements above the tabs: the model and the text, or a choice of texts. */
function header() {
  const model = data.model.replace(/^Bert\((.*)\)$/, "$1").split(", ").join(" · ");
  const parts = [h("p", { class: "model" }, model)];
  if (!hasTexts) return [...parts, h("h1", {}, "Where its attention heads look")];
  if (data.texts.length > 1) parts.push(textList());
  else {
    const { texts } = data.texts[0], isPair = texts.length > 1;
    texts.forEach((text, i) =>
      parts.push(h("h1", { class: text.length > 200 ? "long" : "" }, isPair ? h("span", { class: "segment" }, "AB"[i]) : "", say(text))));
  }
  if (data.texts.some((text) => text.isTruncated)) {
    parts.push(h("p", { class: "note warning" },
      "The text is longer than the model’s positions and was truncated; what follows is of its start."));
  }
  return parts;
}

/** Return the texts as buttons, with the compared word marked. */
function textList() {
  const items = data.texts.map(({ texts }, i) =>
    h("li", {}, h("button", { type: "button", "data-text": i, onclick: () => change({ text: i }) },
      marked(texts.join(" "), data.comparison?.spans[i]))));
  return h("ol", { class: "texts", "aria-label": "Texts" }, ...items);
}

/** Return a text with the characters [start, end) marked. */
function marked(text, [start, end] = [0, 0]) {
  const characters = [...text], part = (i, j) => characters.slice(i, j).join("");
  const element = say(part(0, start));
  element.append(end > start ? h("mark", {}, part(start, end)) : "", part(end));
  return element;
}

/** Return what a fine-tuned model predicts for the text. */
function prediction() {
  const found = currentText().prediction;
  if (!found) return [];
  const field = (name, ...value) => h("p", { class: "field" }, h("span", {}, name), " ", ...value);
  if (found.tokens) {
    return [h("p", { class: "tagged" }, ...found.tokens.map((token, i) => h("span", { class: found.labels[i] === "O" ? "" : "on" },
      say(token), h("small", {}, found.labels[i]))))];
  }
  if (found.answer !== undefined) {
    return [field("Answer", found.answer ? h("strong", {}, say(found.answer)) : "none", ` ${percent(found.probability ?? 0)}`)];
  }
  if (found.probabilities) {
    const best = Object.entries(found.probabilities).sort((a, b) => b[1] - a[1]).slice(0, 6);
    return [h("table", { class: "labels" }, h("caption", {}, "Prediction"), h("tbody", {}, ...best.map(([label, probability]) =>
      h("tr", {}, h("th", { scope: "row" }, say(label)), h("td", { class: "number" }, percent(probability)),
        h("td", { class: "bar", style: `--share: ${probability}` })))))];
  }
  return Object.entries(found).map(([name, value]) => field(name, typeof value === "number" ? number(value, 3) : String(value)));
}

/** Return the tabs of the views for which there is data. */
function tabs() {
  const shown = VIEWS.filter((view) => view.has());
  const buttons = shown.map(({ id, label }) =>
    h("button", {
      type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "panel",
      onclick: () => change({ view: id }),
    }, label));
  const start = Math.max(0, shown.findIndex(({ id }) => id === state.view));
  rove(buttons, { start, onfocus: (i) => change({ view: shown[i].id }) });
  return buttons;
}

/** Build the page. */
function start() {
  performance.mark("start");
  readAddress();
  document.title = ["Attention", ...(hasTexts ? data.texts[0].texts : [])].join(" · ").slice(0, 120);
  document.getElementById("header").append(...header());
  document.getElementById("tabs").append(...tabs());
  openView().then(() => {
    performance.mark("shown");
    document.documentElement.dataset.ready = "true";
  });
  addEventListener("hashchange", () => (readAddress(), openView()));
  addEventListener("resize", drawView);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawView);
}
