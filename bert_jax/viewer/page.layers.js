// Layers view: how alike tokens are after each layer, and how alike a word of several texts is.

/** Build the layers view. */
function openLayers(panel) {
  const { tokens, texts } = currentText(), { length } = tokens, readout = readoutLine();
  let layer = null;
  const map = heatMap({
    rows: tokens, columns: tokens, readout, label: "Cosine of each two tokens’ hidden states",
    cells: tokenMap("cells", currentText()),
    describe: (i, j) => [
      quote(tokens[i]), " and ", quote(tokens[j]), " have a cosine of ",
      `${number(layer.cosines[i * length + j] / 32767)} ${layerName(state.layer)}`,
    ],
    hint: "Point at a cell to read it; click to keep it while the layer changes.",
    onpick: (token, key) => change({ token, key }),
  });
  const chart = data.comparison ? comparison() : null;
  const title = say(`“${texts.join(" ")}”`);
  const which = `All tokens of text ${state.text + 1}, `;
  if (chart) panel.append(chart.element, h("h2", {}, which, title));
  panel.append(h("section", {},
    h("div", { class: "controls" }, layerControl(0), legend("−1", "1", SIGNED, "cosine")),
    h("p", { class: "hint" }, "The cosine of the hidden states of each two tokens, 1 for the same ",
      "direction. All tokens of a layer have much in common: compare its cosines with each other, ",
      "not with 0.", tokens.length > currentText().secondStart ? ` ${BOUNDARY}` : ""),
    map.element, readout));
  return (loaded) => {
    layer = loaded;
    chart?.draw();
    const shade = shades(SIGNED);
    map.paint((i, j) => shade(layer.cosines[i * length + j] / 32767));
    map.mark(state.token !== null && state.key !== null ? [state.token, state.key] : null);
  };
}

const layerName = (layer) => (layer ? `after layer ${layer}` : "in the embeddings");

/** Return the comparison of a word: a line for each two texts, and their numbers as a table. */
function comparison() {
  const { word, cosines } = data.comparison, count = data.texts.length;
  const lines = range(0, count).flatMap((i) => range(i + 1, count).map((j) => ({
    name: `${i + 1}–${j + 1}`, values: cosines.map((layer) => layer[i][j]),
  })));
  const column = (text) => h("th", { scope: "col" }, text), figure = h("div", { class: "chart" });
  const rows = lines.map(({ name, values }, n) => h("tr", {},
    h("th", { scope: "row", style: headStyle(n + 1) }, name),
    ...values.map((value) => h("td", { class: "number" }, number(value)))));
  const table = h("table", {},
    h("thead", {}, h("tr", {}, column("texts"), ...cosines.map((_, i) => column(i || "emb.")))),
    h("tbody", {}, ...rows));
  return {
    element: h("section", {},
      h("h2", {}, "How alike is ", say(`“${word}”`), " in each two texts?"),
      h("p", { class: "hint" }, "The cosine of the word’s vectors, from the embeddings through each ",
        "layer. A line is named by the numbers of its two texts; the dotted line is the layer of the ",
        "slider below."),
      h("div", { class: "comparison" }, figure, h("div", { class: "box" }, table))),
    draw: () => figure.replaceChildren(lineChart(lines, figure.clientWidth,
      `Cosine of “${word}” in each two texts by layer; the numbers are in the table`)),
  };
}

/** Return a chart of lines over the layers, each with its name at its end. */
function lineChart(lines, width, label) {
  const last = lines[0].values.length - 1, nameHeight = 15;
  const height = Math.max(clamp(width / 2, 220, 320), nameHeight * lines.length + 40);
  const [left, right, top, bottom] = [36, width - 56, 10, height - 28];
  const lowest = Math.floor(4 * Math.min(0.99, ...lines.flatMap(({ values }) => values))) / 4;
  const x = (layer) => left + ((right - left) * layer) / last;
  const y = (value) => top + ((bottom - top) * (1 - value)) / (1 - lowest);
  const nth = Math.ceil((34 * (last + 1)) / (right - left)); // which layers have room for a name
  const text = (x, y, content, anchor) => svg("text", { x, y, "text-anchor": anchor }, content);
  const ticks = range(0, 6).map((i) => lowest + (i * (1 - lowest)) / 5).map((tick) =>
    svg("g", { class: "tick" }, svg("line", { x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      text(left - 8, y(tick) + 4, number(tick), "end")));
  const layerNames = range(0, last + 1).filter((layer) => layer % nth === 0).map((layer) =>
    text(x(layer), height - 8, layer || "emb.", "middle"));
  const ends = spread(lines.map(({ values }) => y(values[last])), nameHeight, top, bottom);
  const drawn = lines.map(({ name, values }, n) => svg("g", { class: "line", style: headStyle(n + 1) },
    svg("path", {
      d: `M${values.map((value, i) => `${x(i)},${y(value)}`).join("L")}`,
      "stroke-dasharray": DASHES[dashOf(n + 1)].join(" "),
    }),
    ...values.map((value, i) => svg("circle", { cx: x(i), cy: y(value), r: 3 },
      svg("title", {}, `${name}: ${number(value)} ${layerName(i)}`))),
    svg("path", { class: "leader", d: `M${right + 5},${y(values[last])}L${right + 16},${ends[n]}` }),
    text(right + 20, ends[n] + 4, name, "start")));
  const now = x(state.layer);
  return svg("svg", { width, height, role: "img", "aria-label": label }, ...ticks,
    svg("line", { class: "now", x1: now, x2: now, y1: top, y2: bottom }), ...layerNames, ...drawn);
}

/** Return heights near to those that are wanted, no two of them closer than `apart`, within two. */
function spread(wanted, apart, top, bottom) {
  const placed = [...wanted], order = [...wanted.keys()].sort((a, b) => wanted[a] - wanted[b]);
  for (let round = 0; round < 100; round++) {
    for (let i = 1; i < order.length; i++) {
      const excess = Math.max(0, apart - (placed[order[i]] - placed[order[i - 1]]));
      placed[order[i - 1]] -= excess / 2;
      placed[order[i]] += excess / 2;
    }
  }
  const down = Math.max(0, top - Math.min(...placed));
  const up = Math.max(0, Math.max(...placed) + down - bottom);
  return placed.map((height) => height + down - up);
}

/** Return an element of SVG with attributes and children. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
