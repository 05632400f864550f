// Neuron view: how a head computes the attention of one query, step by step.

const HIDDEN = -5000; // A window adds less than this to the scores that it hides.

/** Build the neuron view. */
function openNeuron(panel) {
  const { tokens, headSize, hasPositionScores } = currentText(), root = Math.sqrt(headSize);
  const query = () => state.token ?? Math.min(1, tokens.length - 1);
  const about = h("p"), scales = h("div", { class: "hint" }), readout = readoutLine();
  const picker = headButtons("Head", "radio", {
    isOn: (head) => head === state.head,
    onclick: (head) => change({ head }),
    onfocus: (head) => head === state.head || change({ head }),
  });
  const strip = tokenStrip("Query", tokens, query, (token) => change({ token, key: null }));
  const columns = [
    ["q·k", "q·k", hasPositionScores ? "the sum of the products" : "the score: the sum of the products"],
    ["position", "+ position", "what is added for the positions of query and key"],
    ["scaled", `÷ √${headSize}`, "the scaled score"],
    ["softmax", "softmax", "computed in this page"],
  ].filter(([name]) => hasPositionScores || name !== "position");
  const bands = () => h("div", { class: "bands", "aria-hidden": "true" },
    ...["q", "k", "q × k"].map((name) => h("span", {}, name)));
  const rows = tokens.map((token, key) => h("tr", {
    onpointerenter: () => explain(key), onkeydown: (event) => walk(event, key),
  },
  h("th", { scope: "row" }, say(token)),
  h("td", {}, h("div", { class: "products" }, bands(), h("canvas", {
    role: "img", "aria-label": `${headSize} products`,
    style: `width: ${headSize * clamp(Math.floor(400 / headSize), 4, 14)}px`,
    onpointermove: (event) => showTip(event, [product(key, dimensionAt(event))]),
    onpointerleave: hideTip, onclick: (event) => explain(key, dimensionAt(event)),
  }))),
  ...columns.map(([name], i) =>
    h("td", { class: `number ${name}${i < columns.length - 1 ? "" : " share"}` }))));
  rove(rows, { onfocus: (key) => explain(key) });
  const heading = (text, title, name = "") =>
    h("th", { scope: "col", title, class: name }, text);
  panel.append(
    h("div", { class: "controls" }, layerControl(1), picker.element), strip.element, about, scales,
    h("div", { class: "box tall" }, h("table", { class: "neurons" },
      h("thead", {}, h("tr", {}, heading("key", ""),
        heading("query × key = product", "from the top of each row"),
        ...columns.map(([name, text, title], i) =>
          heading(text, title, `${name} ${i < columns.length - 1 ? "number" : "share"}`)))),
      h("tbody", {}, ...rows))),
    readout);
  let steps = null, dimension = null;

  /** Compute the scores of the query and each key by a head, and their softmax. */
  function compute(layer) {
    const row = (state.head - 1) * tokens.length, vector = (array, token) =>
      array.subarray((row + token) * headSize, (row + token + 1) * headSize);
    const q = vector(layer.queries, query());
    const keys = tokens.map((_, key) => {
      const k = vector(layer.keys, key), products = q.map((x, i) => x * k[i]);
      const sum = products.reduce((a, b) => a + b, 0);
      const position = layer.positions?.[(row + query()) * tokens.length + key] ?? 0;
      const map = weight(layer, state.head, query(), key);
      return { k, products, sum, position, score: (sum + position) / root, map };
    });
    const largest = Math.max(...keys.map(({ score }) => score)); // whose exponential may overflow
    const sum = keys.reduce((sum, { score }) => sum + Math.exp(score - largest), 0);
    for (const step of keys) step.share = Math.exp(step.score - largest) / sum;
    return { q, keys, total: sum * Math.exp(largest) };
  }

  /** Return a product of the query and a key in words. */
  function product(key, i) {
    const { k, products } = steps.keys[key];
    return `index ${i}: ${number(steps.q[i])} × ${number(k[i])} = ${number(products[i])}`;
  }

  /** Return the index below the pointer. */
  const dimensionAt = ({ offsetX, target }) =>
    clamp(Math.floor((offsetX / target.clientWidth) * headSize), 0, headSize - 1);

  /** Walk over the products of a row with the arrow keys. */
  function walk(event, key) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    explain(key, clamp((dimension ?? -1) + step, 0, headSize - 1));
  }

  /** Follow the computation for a key in words, with one of its products or the largest. */
  function explain(key, chosen = null) {
    dimension = chosen;
    rows.forEach((row, i) => row.classList.toggle("on", i === key));
    const { products, sum, position, score, share, map } = steps.keys[key];
    const sizes = products.map(Math.abs), largest = sizes.indexOf(Math.max(...sizes));
    const which = `${chosen === null ? "The largest product is at" : "At"} ` +
      `${product(key, chosen ?? largest)}.`;
    const start = [quote(tokens[query()]), " → ", quote(tokens[key]), `: q·k = ${number(sum)}`];
    if (position < HIDDEN) {
      const why = "; it is outside of this layer’s window, so its share is 0%. ";
      readout.replaceChildren(...start, why, which);
      return;
    }
    readout.replaceChildren(
      ...start,
      hasPositionScores ? `, plus ${number(position)} for the position` : "",
      `; ÷ √${headSize} = ${number(score, 3)}; exp(${number(score, 3)}) = `,
      `${Math.exp(score).toPrecision(4)}, over the sum ${steps.total.toPrecision(4)}, is `,
      `${percent(share)}; the model’s own map, stored in 8 bits, has ${percent(map)}. `, which);
  }

  /** Draw the query, a key and their products, one below the other. */
  function drawStrips(canvas, { k, products }, largest, largestProduct, shade) {
    const strips = [steps.q, k, products], scale = [largest, largest, largestProduct];
    paint(canvas, 11, headSize, (i, j) => {
      const strip = Math.floor(i / 4); // three pixels high, with one between
      return i % 4 < 3 ? shade(strips[strip][j] / scale[strip]) : 0;
    });
  }

  return (layer) => {
    steps = compute(layer);
    picker.refresh();
    strip.refresh();
    const { q, keys, total } = steps, shade = shades(SIGNED);
    const most = (arrays) => Math.max(...arrays.map((array) => Math.max(...array.map(Math.abs))), 1e-9);
    const largest = most([q, ...keys.map(({ k }) => k)]);
    const largestProduct = most(keys.map(({ products }) => products));
    rows.forEach((row, key) => {
      const { sum, position, score, share } = keys[key], [, picture, ...cells] = row.children;
      const values = {
        "q·k": number(sum), position: position < HIDDEN ? "hidden" : number(position),
        scaled: position < HIDDEN ? "" : number(score, 3),
        softmax: percent(share),
      };
      columns.forEach(([name], i) => (cells[i].textContent = values[name]));
      cells.at(-1).style.setProperty("--share", share);
      drawStrips(picture.querySelector("canvas"), keys[key], largest, largestProduct, shade);
    });
    about.replaceChildren(
      `How head ${state.head} of layer ${state.layer} looks from `, quote(tokens[query()]),
      `: its query and the key of each token are ${headSize} numbers each. Multiplied one by one and `,
      hasPositionScores ? "added up, they give q·k; with what is added for their positions, the " +
        "score. " : "added up, they give the score, q·k. ",
      `Divided by √${headSize} = ${root.toFixed(2)}, that is the scaled score. Its exponential, `,
      `over the sum for all keys (${total.toPrecision(4)}), is the share: the softmax.`);
    scales.replaceChildren(
      legend(number(-largest), number(largest), SIGNED, "query, key"),
      legend(number(-largestProduct), number(largestProduct), SIGNED, "product"));
    const shares = keys.map(({ share }) => share);
    explain(state.key ?? shares.indexOf(Math.max(...shares)));
  };
}

/** Return tokens as buttons of which one is chosen. */
function tokenStrip(label, tokens, chosen, onchange) {
  const buttons = tokens.map((token, i) =>
    button({ role: "radio", class: "token", onclick: () => onchange(i) }, say(token)));
  rove(buttons, { start: chosen(), onfocus: (i) => i === chosen() || onchange(i) });
  return {
    element: h("div", { class: "strip", role: "radiogroup", "aria-label": label },
      h("span", {}, label), ...buttons),
    refresh: () => buttons.forEach((each, i) => each.setAttribute("aria-checked", i === chosen())),
  };
}
