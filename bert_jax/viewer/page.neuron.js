// Neuron view: how a head's attention of one query comes about, step by step.

/** Build the neuron view. */
function openNeuron(panel) {
  const { tokens, heads, headSize, hasPositionScores } = currentText();
  const root = Math.sqrt(headSize), all = range(0, tokens.length);
  const query = () => state.token ?? Math.min(1, tokens.length - 1);
  const about = h("p"), scales = h("p", { class: "hint" });
  const readout = h("p", { class: "readout", role: "status" });
  const strip = tokenStrip("Query", tokens, query, (token) => change({ token, key: null }));
  const picker = headPicker(heads);
  const rows = all.map((key) => {
    const cells = ["q·k", ...(hasPositionScores ? ["position"] : []), "score", "softmax", "map"];
    return h("tr", { onpointerenter: () => explain(key), onkeydown: (event) => walk(event, key) },
      h("th", { scope: "row" }, say(tokens[key])),
      h("td", {}, h("canvas", {
        role: "img", style: `width: ${headSize * Math.max(4, Math.min(14, Math.floor(400 / headSize)))}px`,
        onpointermove: (event) => showTip(event, [product(key, dimensionAt(event))]),
        onclick: (event) => explain(key, dimensionAt(event)),
        onpointerleave: hideTip,
      })),
      ...cells.map((name) => h("td", { class: `number ${name}` })));
  });
  rove(rows, { onfocus: (key) => explain(key) });
  const heading = (text, title) => h("th", { scope: "col", title }, text);
  const table = h("table", { class: "neurons" },
    h("thead", {}, h("tr", {},
      heading("key"), heading("query × key = product"), heading("q·k", "the sum of the products"),
      ...(hasPositionScores ? [heading("+ position", "the relative position's part of the score")] : []),
      heading(`÷ √${headSize}`, "the score"), heading("softmax", "computed in this page"),
      heading("map", "what the model computed, with 8 bits"))),
    h("tbody", {}, ...rows));
  panel.append(h("div", { class: "controls" }, layerControl(1), picker), strip.element, about, scales,
    h("div", { class: "box tall" }, table), readout);
  let steps = null, dimension = null;

  /** Compute the scores of the query and the keys of a head of a layer, and their softmax. */
  function compute(layer) {
    const vector = (array, token) => {
      const start = ((state.head - 1) * tokens.length + token) * headSize;
      return array.subarray(start, start + headSize);
    };
    const q = vector(layer.queries, query()), row = (state.head - 1) * tokens.length + query();
    const found = all.map((key) => {
      const k = vector(layer.keys, key), products = q.map((x, i) => x * k[i]);
      const sum = products.reduce((a, b) => a + b, 0);
      const position = layer.positions?.[row * tokens.length + key] ?? 0;
      return { k, products, sum, position, score: (sum + position) / root, map: weight(layer, state.head, query(), key) };
    });
    const top = Math.max(...found.map(({ score }) => score));
    const powers = found.map(({ score }) => Math.exp(score - top)), total = powers.reduce((a, b) => a + b, 0);
    found.forEach((step, i) => (step.share = powers[i] / total));
    return { q, keys: found, total: total * Math.exp(top) };
  }

  /** Return a product of the query and a key in words. */
  const product = (key, i) => `dimension ${i + 1}: ${number(steps.q[i])} × ${number(steps.keys[key].k[i])} = ` +
    number(steps.keys[key].products[i]);

  /** Return the dimension below the pointer. */
  const dimensionAt = ({ offsetX, target }) =>
    Math.min(headSize - 1, Math.max(0, Math.floor((offsetX / target.clientWidth) * headSize)));

  /** Walk over the products of a row with the arrow keys. */
  function walk(event, key) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    explain(key, Math.min(headSize - 1, Math.max(0, (dimension ?? -1) + step)));
  }

  /** Follow the computation for a key in words, with one of its products or the largest. */
  function explain(key, chosen = null) {
    dimension = chosen;
    const { products, sum, position, score, share, map } = steps.keys[key];
    const largest = [...products.keys()].sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]))[0];
    readout.replaceChildren(
      quote(tokens[query()]), " → ", quote(tokens[key]), `: q·k = ${number(sum)}`,
      hasPositionScores ? `, and ${number(position)} for the position` : "",
      `; ÷ √${headSize} = ${number(score, 3)}; e`, h("sup", {}, number(score, 3)), ` = ${Math.exp(score).toPrecision(4)}, `,
      `over the sum ${steps.total.toPrecision(4)}, is ${percent(share)}; the model’s own map has ${percent(map)}. `,
      chosen === null ? `The largest product is in ${product(key, largest)}.` : `In ${product(key, chosen)}.`);
  }

  /** Draw the query, a key and their products below each other. */
  function drawStrips(row, { k, products }, largest, largestProduct, colours) {
    const canvas = row.querySelector("canvas"), strips = [steps.q, k, products];
    paint(canvas, 11, headSize, (i, j) => {
      const strip = Math.floor(i / 4), x = strips[strip][j];
      if (i % 4 === 3) return 0;
      return tint(colours, 0.5 + x / (2 * (strip === 2 ? largestProduct : largest)));
    });
  }

  return (layer) => {
    steps = compute(layer);
    picker.refresh();
    strip.refresh();
    const colours = palette(SIGNED), most = (arrays) => Math.max(...arrays.map((x) => Math.max(...x.map(Math.abs))), 1e-9);
    const largest = most([steps.q, ...steps.keys.map(({ k }) => k)]), largestProduct = most(steps.keys.map((x) => x.products));
    rows.forEach((row, key) => {
      const step = steps.keys[key], [, pictures, ...cells] = row.children;
      drawStrips(row, step, largest, largestProduct, colours);
      pictures.firstChild.setAttribute("aria-label", `query, key and product: ${headSize} numbers each`);
      const numbers = [number(step.sum), ...(hasPositionScores ? [number(step.position)] : []), number(step.score, 3)];
      [...numbers, percent(step.share), percent(step.map)].forEach((text, i) => (cells[i].textContent = text));
      cells.at(-2).style.setProperty("--share", step.share);
      cells.at(-1).style.setProperty("--share", step.map);
    });
    about.replaceChildren(
      `How head ${state.head} of layer ${state.layer} looks from `, quote(tokens[query()]),
      `: its query and the key of each token are ${headSize} numbers each. Multiplied one by one and added up, they give q·k. `,
      hasPositionScores ? "The score of their relative position is added. " : "",
      `Divided by √${headSize} = ${root.toFixed(2)}, that is the score; e to the power of the score, over the sum for all keys `,
      `(${steps.total.toPrecision(4)}), is the share of attention: the softmax.`);
    scales.replaceChildren("In each row, from the top: query, key, product. ",
      legend(number(-largest), number(largest), SIGNED, "query, key"), " ",
      legend(number(-largestProduct), number(largestProduct), SIGNED, "product"));
    explain(state.key ?? steps.keys.reduce((best, { share }, i) => (share > steps.keys[best].share ? i : best), 0));
  };
}

/** Return buttons of which one head is chosen. */
function headPicker(count) {
  const buttons = range(1, count + 1).map((head) =>
    h("button", {
      type: "button", role: "radio", "aria-label": `Head ${head}`, style: headStyle(head),
      onclick: () => change({ head }),
    }, String(head)));
  rove(buttons, { start: state.head - 1, onfocus: (i) => state.head !== i + 1 && change({ head: i + 1 }) });
  const element = h("div", { class: "control" }, h("span", {}, "Head"),
    h("div", { class: "swatches", role: "radiogroup", "aria-label": "Head" }, ...buttons));
  element.refresh = () => buttons.forEach((button, i) => button.setAttribute("aria-checked", String(i + 1 === state.head)));
  return element;
}

/** Return a text's tokens as buttons, one of which is chosen. */
function tokenStrip(label, tokens, chosen, onchange) {
  const buttons = tokens.map((token, i) =>
    h("button", { type: "button", role: "radio", class: "token", onclick: () => onchange(i) }, say(token)));
  rove(buttons, { start: chosen(), onfocus: (i) => i !== chosen() && onchange(i) });
  return {
    element: h("div", { class: "strip", role: "radiogroup", "aria-label": label }, h("span", {}, label), ...buttons),
    refresh: () => buttons.forEach((button, i) => button.setAttribute("aria-checked", String(i === chosen()))),
  };
}
