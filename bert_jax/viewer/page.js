"use strict";

// The page's data, what is chosen, and what the views share. A view (page.*.js) is a function that
// builds its controls in the panel and returns a function that draws the numbers of a layer.

/** What the page is about: the model, the texts, a comparison, patterns; see view.py. */
const data = JSON.parse(document.getElementById("data").textContent);
const hasTexts = data.texts.length > 0;
const hasGuesses = data.texts.some(({ guesses }) => Object.keys(guesses).length);

/** The views: whether there is anything to show in it, and the first layer that it shows. */
const VIEWS = [
  { id: "head", label: "Heads", open: openHeads, has: hasTexts, first: 1 },
  { id: "model", label: "Model", open: openModel, has: hasTexts, first: 1 },
  { id: "neuron", label: "Neurons", open: openNeuron, has: hasTexts, first: 1 },
  { id: "layers", label: "Layers", open: openLayers, has: hasTexts, first: 0 },
  { id: "masked", label: "Masked", open: openMasked, has: hasGuesses, first: 0 },
  { id: "patterns", label: "Patterns", open: openPatterns, has: "patterns" in data, first: 0 },
].filter(({ has }) => has);

/**
 * What is chosen, as the address has it. Texts and tokens are counted from 0, layers and heads from
 * 1; layer 0 are the embeddings. `token` is a query or a row of a map, `key` a key or a column.
 * `heads` are those of the head view, null for all; `map` is 1 while the model view shows a map;
 * `hide` is 1 while the head view hides the lines of [CLS] and [SEP].
 */
const state = {
  view: "", text: 0, layer: 1, head: 1, heads: null, token: null, key: null, direction: "all",
  map: null, hide: null,
};

const currentText = () => data.texts[state.text];

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

/** Return the arrays of a layer of a text by name, as `_layer` in view.py writes them. */
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
  const layer = { length, cosines: next(Int16Array, length * length) };
  if (index) {
    layer.queries = halves(heads * length * headSize);
    layer.keys = halves(heads * length * headSize);
    layer.positions = hasPositionScores ? halves(heads * length * length) : null;
    layer.largest = halves(heads * length);
    layer.maps = next(Uint8Array, heads * length * length);
  }
  return layer;
}

/** The layers that were read last, as promises by name; the least recently used is first. */
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

/** Return how much a query attends to a key by a head. */
function weight(layer, head, query, key) {
  const row = (head - 1) * layer.length + query;
  return (layer.maps[row * layer.length + key] * layer.largest[row]) / 255;
}

/** Return the whole numbers from `start` up to, but not including, `end`. */
const range = (start, end) => Array.from({ length: Math.max(0, end - start) }, (_, i) => start + i);

/** Return a number that is within two others. */
const clamp = (x, least, most) => Math.min(most, Math.max(least, x));

const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** Return a number in words, with a minus sign that is as wide as a digit. */
const number = (x, digits = 2) => x.toFixed(digits).replace("-", "−");

// ---------------------------------------------------------------- elements

/** Return an element with attributes, "on…" listeners and children; strings are never markup.
 *  True is an attribute without a value, so that of "aria-…" is "true" in quotes. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Return a button. */
const button = (attributes, ...children) => h("button", { type: "button", ...attributes }, ...children);

/** Return a token or a text, which may be of any direction of writing. */
const say = (text) => h("bdi", { dir: "auto", translate: "no" }, text);

/** Return a token as it stands in a sentence. */
const quote = (token) => h("bdi", { class: "token", dir: "auto", translate: "no" }, token);

/** Return the line that says in words what is pointed at. */
const readoutLine = () => h("p", { class: "readout", role: "status" });

/** Return the value of a colour of page.css. */
const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** What tells heads apart: eight hues, and dashes after the first and the second eight. */
const HUES = 8;
const DASHES = [[], [5, 3], [1, 3]];
const hueOf = (head) => `head-${(head - 1) % HUES}`;
const dashOf = (head) => Math.min(2, Math.floor((head - 1) / HUES));

/** Return the style of a head. */
const headStyle = (head) =>
  `--hue: var(--${hueOf(head)}); --dash: ${["solid", "dashed", "dotted"][dashOf(head)]}`;

/** Make arrow keys, Home and End move the focus among elements, one of which Tab reaches. */
function rove(elements, { columns = 1, start = 0, onfocus = () => {} } = {}) {
  const reach = (chosen) => elements.forEach((each, i) => (each.tabIndex = i === chosen ? 0 : -1));
  reach(start);
  elements.forEach((element, i) => {
    const steps = {
      ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1,
      Home: -i, End: elements.length - 1 - i,
    };
    element.addEventListener("keydown", (event) => {
      if (!(event.key in steps)) return;
      event.preventDefault();
      elements[i + steps[event.key]]?.focus();
    });
    element.addEventListener("focus", () => (reach(i), onfocus(i)));
  });
}

/** Return a slider over the layers from `first` on. */
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

/** Return a button for each head of a text, and how to show which heads are on. */
function headButtons(label, role, { isOn, onclick, ...listeners }) {
  const buttons = range(1, currentText().heads + 1).map((head) => button({
    role, "aria-label": `Head ${head}`, style: headStyle(head), onclick: () => onclick(head),
    ...Object.fromEntries(Object.entries(listeners).map(([name, f]) => [name, () => f(head)])),
  }, String(head)));
  rove(buttons, { start: state.head - 1 });
  const group = role === "radio" ? "radiogroup" : "group";
  return {
    element: h("div", { class: "control" }, h("span", {}, label),
      h("div", { class: "swatches", role: group, "aria-label": label }, ...buttons)),
    refresh: () => buttons.forEach((each, i) => each.setAttribute("aria-checked", isOn(i + 1))),
  };
}

/** Return buttons of which one is chosen: `options` are values with their labels and titles. */
function choice(label, options, chosen, onchange) {
  const buttons = options.map(([value, text, title = ""]) => button({
    role: "radio", title, "aria-checked": value === chosen ? "true" : "false",
    onclick: (event) => {
      buttons.forEach((each) => each.setAttribute("aria-checked", each === event.target));
      onchange(value);
    },
  }, text));
  rove(buttons, { start: options.findIndex(([value]) => value === chosen) });
  return h("div", { class: "control" }, h("span", {}, label),
    h("div", { class: "choice", role: "radiogroup", "aria-label": label }, ...buttons));
}

// ---------------------------------------------------------------- what is chosen

/** Take over what the address says, as far as it fits the data. */
function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const within = (name, first, last, otherwise) => {
    const value = Number.parseInt(fields.get(name) ?? "", 10);
    return value >= first && value <= last ? value : otherwise;
  };
  const asked = (id) => VIEWS.find((view) => view.id === id);
  state.view = (asked(fields.get("view")) ?? asked(data.comparison && "layers") ?? VIEWS[0]).id;
  if (!hasTexts) return;
  state.text = within("text", 0, data.texts.length - 1, 0);
  const text = currentText(), last = text.tokens.length - 1;
  // Without an address the page opens on the head that stands out most.
  const opens = location.hash ? [1, 1] : text.outstandingHead;
  state.layer = within("layer", 0, text.layers, opens[0]);
  state.head = within("head", 1, text.heads, opens[1]);
  state.heads = fields.get("heads")?.split(".").map(Number) ?? (location.hash ? null : [opens[1]]);
  state.token = within("token", 0, last, null);
  state.key = within("key", 0, last, null);
  const isPair = text.secondStart < text.tokens.length, direction = fields.get("direction");
  state.direction = isPair && Object.hasOwn(DIRECTIONS, direction) ? direction : "all";
  state.map = within("map", 1, 1, null);
  state.hide = within("hide", 1, 1, null);
}

/** Write what is chosen to the address, so that a link opens the same. */
function writeAddress() {
  const fields = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value === null || value === "all") continue;
    fields.set(name, Array.isArray(value) ? value.join(".") : value);
  }
  try {
    history.replaceState(null, "", `#${fields}`);
  } catch {
    // The frame of a notebook has no address of its own.
  }
}

let draw = () => {}; // of the open view
let drawings = 0;

/** Change what is chosen, and show it. */
function change(changes) {
  const isOther = (name) => name in changes && changes[name] !== state[name];
  const isOtherText = isOther("text"), isOtherView = isOther("view") || isOtherText;
  Object.assign(state, isOtherText ? { token: null, key: null } : {}, changes);
  writeAddress();
  return isOtherView ? openView() : drawView();
}

/** Draw the open view once its layer is read, unless something else was chosen by then. */
async function drawView() {
  const drawing = ++drawings;
  try {
    const layer = hasTexts && (await getLayer(state.text, state.layer));
    if (drawing !== drawings) return;
    for (const each of document.querySelectorAll(".legend canvas")) each.draw(); // in new colours
    draw(layer);
    document.querySelectorAll(".box, [role=tablist]").forEach(markMore);
  } catch (error) {
    const reason = "The numbers cannot be read: the file is incomplete, or the browser too old. ";
    document.getElementById("panel").replaceChildren(h("p", { class: "warning" }, reason, `${error}`));
    throw error;
  }
}

/** Let a box fade at its end while there is more to scroll to. */
function markMore(box) {
  box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
}

/** Build the chosen view of the chosen text. */
function openView() {
  const view = VIEWS.find(({ id }) => id === state.view), panel = document.getElementById("panel");
  state.layer = Math.max(view.first, state.layer);
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.setAttribute("aria-selected", tab.id === `tab-${view.id}`);
    tab.tabIndex = tab.id === `tab-${view.id}` ? 0 : -1;
  }
  for (const each of document.querySelectorAll(".texts button")) {
    each.setAttribute("aria-pressed", each.value === String(state.text));
  }
  if (hasTexts) document.getElementById("prediction").replaceChildren(...prediction());
  hideTip();
  panel.setAttribute("aria-labelledby", `tab-${view.id}`);
  panel.replaceChildren();
  draw = view.open(panel);
  return drawView();
}

// ---------------------------------------------------------------- the page

/** Return what is above the tabs: the model and the text, or the texts to choose from. */
function header() {
  const parts = [h("p", { class: "model" }, modelName())];
  if (!hasTexts) parts.push(h("h1", {}, "Where the attention heads look"));
  else if (data.comparison) {
    const word = say(`“${data.comparison.word}”`);
    parts.push(h("h1", {}, word, ` in ${data.texts.length} texts`), textButtons(),
      h("p", { class: "hint" }, "The matrix below and the other tabs are of the " +
        "highlighted text; click another to choose it."));
  } else {
    const { texts } = data.texts[0], isPair = texts.length > 1;
    parts.push(...texts.map((text, i) =>
      h("h1", { class: text.length > 200 ? "long" : "" },
        isPair ? h("span", { class: "segment" }, "AB"[i]) : "", say(text))));
  }
  if (data.texts.some(({ isTruncated }) => isTruncated)) {
    parts.push(h("p", { class: "warning" },
      "The text is longer than the model’s positions and was truncated: this is its start."));
  }
  return parts;
}

/** Return the model's kind and sizes in words. */
function modelName() {
  return data.model.replace(/^Bert\((.*)\)$/, "$1").split(", ").join(" · ");
}

/** Return the compared texts as buttons, with the word marked. */
function textButtons() {
  const items = data.texts.map(({ texts }, i) => h("li", {},
    button({ value: i, onclick: () => change({ text: i }) },
      marked(texts.join(" "), data.comparison.spans[i]))));
  return h("ol", { class: "texts", "aria-label": "Texts" }, ...items);
}

/** Return a text of which the characters from `start` to `end` are marked. */
function marked(text, [start, end]) {
  const characters = [...text], part = (i, j) => characters.slice(i, j).join(""); // as Python counts
  const element = say(part(0, start));
  element.append(h("mark", {}, part(start, end)), part(end));
  return element;
}

/** Return what a fine-tuned model predicts for the text. */
function prediction() {
  const length = currentText().predictionLength, parts = predictionParts();
  return length ? [h("p", { class: "warning" },
    `The prediction reads at most ${length} tokens at once; what is below is of one sequence.`),
  ...parts] : parts;
}

/** Return the values of a prediction. */
function predictionParts() {
  const found = currentText().prediction ?? {};
  const { tokens, labels, answer, probability, probabilities, ...rest } = found;
  const field = (name, ...value) => h("p", { class: "field" }, h("span", {}, name), " ", ...value);
  if (tokens) {
    return [h("p", { class: "tagged" }, ...tokens.map((token, i) =>
      h("span", { class: labels[i] === "O" ? "" : "on" }, say(token), h("small", {}, labels[i]))))];
  }
  if (answer !== undefined) {
    const share = probability === null ? "" : ` ${percent(probability)}`;
    return [field("Answer", answer ? h("strong", {}, say(answer)) : "none", share)];
  }
  if (probabilities) {
    const best = Object.entries(probabilities).sort((a, b) => b[1] - a[1]).slice(0, 6);
    const rows = best.map(([label, share]) => h("tr", {}, h("th", { scope: "row" }, say(label)),
      h("td", { class: "number" }, percent(share)),
      h("td", { class: "bar", style: `--share: ${share}` })));
    const table = h("table", { class: "labels" },
      h("caption", {}, labels ? "Probabilities" : "Prediction"), h("tbody", {}, ...rows));
    return labels ? [field("Prediction", say(labels.join(", ") || "no label")), table] : [table];
  }
  return Object.entries(rest).map(([name, value]) =>
    field(name, typeof value === "number" ? number(value, 3) : String(value)));
}

/** Return the tabs. */
function tabs() {
  const buttons = VIEWS.map(({ id, label }) => button({
    role: "tab", id: `tab-${id}`, "aria-controls": "panel", onclick: () => change({ view: id }),
  }, label));
  const start = VIEWS.findIndex(({ id }) => id === state.view);
  rove(buttons, { start, onfocus: (i) => change({ view: VIEWS[i].id }) });
  return buttons;
}

/** Build the page. */
async function start() {
  readAddress();
  document.title = [...(data.texts[0]?.texts ?? []), modelName(), "attention"].join(" · ");
  document.getElementById("header").append(...header());
  document.getElementById("tabs").append(...tabs());
  addEventListener("hashchange", () => (readAddress(), openView()));
  addEventListener("resize", drawView);
  document.addEventListener("scroll", ({ target }) => target.classList && markMore(target), true);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawView);
  await openView();
  document.documentElement.dataset.ready = "true";
}
