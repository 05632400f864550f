// Layers view: how alike tokens are after each layer, and a word of several texts.

/** Build the layers view. */
function openLayers(panel) {
  const { tokens } = currentText();
  const readout = h("p", { class: "readout", role: "status" });
  let layer = null;
  const map = heatMap({
    rows: tokens, columns: tokens, readout, label: "Cosine of each two tokens’ hidden states; arrow keys move",
    describe: (i, j) => [
      quote(tokens[i]), " and ", quote(tokens[j]), ` cosine ${number(layer.cosines[i * tokens.length + j] / 32767)}`,
      ` ${state.layer ? `after layer ${state.layer}` : "of the embeddings"}`,
    ],
    hint: "Point at a cell to read it; click to keep it while the layer changes.",
    onpick: (token, key) => change({ token, key }),
  });
  const chart = data.comparison ? comparison() : null;
  panel.append(
    ...(chart ? [chart.element, h("h2", {}, "All tokens of ", say(`“${currentText().texts.join(" ")}”`))] : []),
    h("section", {},
      h("div", { class: "controls" }, layerControl(0), legend("−1", "1", SIGNED, "cosine")),
      h("p", { class: "hint" }, "The cosine of the hidden states of each two tokens: 1 where the model makes them alike, ",
        "0 where they have nothing in common."),
      map.element, readout));
  return (loaded) => {
    layer = loaded;
    chart?.draw();
    const colours = palette(SIGNED), { length } = tokens;
    map.paint((i, j) => tint(colours, 0.5 + layer.cosines[i * length + j] / 65534));
    map.mark(state.token !== null && state.key !== null ? [state.token, state.key] : null);
  };
}

/** Return the comparison of a word in several texts: a line for each two texts, and a table. */
function comparison() {
  const { word, cosines } = data.comparison, count = data.texts.length;
  const pairs = range(0, count).flatMap((i) => range(i + 1, count).map((j) => [i, j]));
  const name = ([i, j]) => `${i + 1}–${j + 1}`;
  const layerName = (layer) => (layer ? String(layer) : "emb.");
  const figure = h("div", { class: "chart" });
  const table = h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "texts"),
      ...cosines.map((_, layer) => h("th", { scope: "col" }, layerName(layer))))),
    h("tbody", {}, ...pairs.map(([i, j], n) => h("tr", {}, h("th", { scope: "row", style: headStyle(n + 1) }, name([i, j])),
      ...cosines.map((layer) => h("td", { class: "number" }, number(layer[i][j])))))));
  const element = h("section", {},
    h("h2", {}, "How alike is ", say(`“${word}”`), " in each two texts?"),
    h("p", { class: "hint" }, "The cosine of the word’s vectors, from the embeddings through each layer. ",
      "A line is named by the numbers of its two texts."),
    h("div", { class: "comparison" }, figure, h("div", { class: "box" }, table)));
  return { element, draw: () => figure.replaceChildren(lineChart(pairs.map((pair) => ({
    name: name(pair), values: cosines.map((layer) => layer[pair[0]][pair[1]]),
  })), layerName)) };

  /** Draw lines over the layers, as wide as there is room. */
  function lineChart(lines, xName) {
    const width = Math.min(figure.clientWidth, 760), height = Math.min(320, Math.max(220, width / 2));
    const [left, right, top, bottom] = [36, 56, 10, 28], last = cosines.length - 1;
    const lowest = Math.floor(4 * Math.min(0.99, ...lines.flatMap(({ values }) => values))) / 4;
    const ticks = range(0, 6).map((i) => lowest + (i * (1 - lowest)) / 5);
    const x = (layer) => left + ((width - left - right) * layer) / Math.max(1, last);
    const y = (value) => top + ((height - top - bottom) * (1 - value)) / (1 - ticks[0]);
    const ends = spread(lines.map(({ values }) => y(values[last])), 15);
    const step = Math.ceil((last + 1) / Math.max(2, (width - left - right) / 34));
    return svg("svg", { width, height, role: "img", "aria-label": `Cosine of ${word} by layer; the numbers are in the table` },
      ...ticks.map((tick) => svg("g", { class: "tick" },
        svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
        svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, number(tick)))),
      svg("line", { class: "now", x1: x(state.layer), x2: x(state.layer), y1: top, y2: height - bottom }),
      ...range(0, last + 1).filter((layer) => layer % step === 0).map((layer) =>
        svg("text", { x: x(layer), y: height - 8, "text-anchor": "middle" }, xName(layer))),
      ...lines.map(({ name, values }, n) => svg("g", { class: "line", style: headStyle(n + 1) },
        svg("path", { d: `M${values.map((value, i) => `${x(i)},${y(value)}`).join("L")}`, "stroke-dasharray": DASHES[headRound(n + 1)].join(" ") }),
        ...values.map((value, i) => svg("circle", { cx: x(i), cy: y(value), r: 3 },
          svg("title", {}, `${name}: ${number(value)}, ${i ? `layer ${i}` : "embeddings"}`))),
        svg("path", { class: "leader", d: `M${x(last) + 5},${y(values[last])}L${x(last) + 16},${ends[n]}` }),
        svg("text", { x: x(last) + 20, y: ends[n] + 4 }, name))));
  }
}

/** Return heights near to those that are wanted, no two of them closer than `apart`. */
function spread(wanted, apart) {
  const placed = [...wanted], order = [...wanted.keys()].sort((a, b) => wanted[a] - wanted[b]);
  for (let round = 0; round < 100; round++) {
    for (let i = 1; i < order.length; i++) {
      const excess = apart - (placed[order[i]] - placed[order[i - 1]]);
      if (excess <= 0) continue;
      placed[order[i - 1]] -= excess / 2;
      placed[order[i]] += excess / 2;
    }
  }
  return placed;
}

/** Return an element of SVG with attributes and children. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
