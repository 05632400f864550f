// Model view: the maps of all layers and heads, small; one at a time opens large.

const SMALL_MAP = 64; // pixels at most

/** Build the model view. */
function openModel(panel) {
  const { tokens, layers: count, heads, secondStart } = currentText(), { length } = tokens;
  const size = Math.min(length, SMALL_MAP), names = range(1, heads + 1);
  const rows = range(1, count + 1).map((layer) => names.map((head) => button({
    ...tokenMap("small-map", currentText()), "aria-label": `Layer ${layer}, head ${head}`,
    onclick: () => open(layer, head),
  }, h("canvas", { width: size, height: size }))));
  rove(rows.flat(), { columns: heads, start: (state.layer - 1) * heads + state.head - 1 });
  const grid = h("div", { class: "maps", style: `--heads: ${heads}` },
    h("span", { class: "corner" }, "Layer ╲ head"),
    ...names.map((head) => h("span", {}, String(head))),
    ...rows.flatMap((buttons, i) => [h("span", {}, String(i + 1)), ...buttons]));
  const dialog = h("dialog", { onclose: () => change({ map: null }) });
  panel.append(
    h("div", { class: "hint" }, "Each square is the map of a head, with a row for each query and a ",
      `column for each key. Click one to read it. ${secondStart < length ? BOUNDARY : ""}`,
      length > size ? " In these small ones a pixel is the largest weight of several. " : "",
      legend("0%", "100%", SHARES)),
    h("div", { class: "box" }, grid), dialog);

  /** Draw the maps of a layer; a pixel is the largest of the weights that it stands for. */
  function drawLayer(layer, index, shade) {
    for (const head of names) {
      const largest = new Float32Array(size * size), means = new Float32Array(length);
      for (let query = 0; query < length; query++) {
        const row = Math.floor((query * size) / length) * size;
        for (let key = 0; key < length; key++) {
          const share = weight(layer, head, query, key);
          const pixel = row + Math.floor((key * size) / length);
          largest[pixel] = Math.max(largest[pixel], share);
          means[key] += share / length;
        }
      }
      const each = rows[index - 1][head - 1], most = means.indexOf(Math.max(...means));
      paint(each.firstChild, size, size, (i, j) => shade(largest[i * size + j]));
      const about = `looks most at ${tokens[most]}, ${percent(means[most])} on average`;
      each.title = `Layer ${index}, head ${head}: ${about}`;
      each.setAttribute("aria-label", each.title);
    }
  }

  /** Show a map large. */
  async function open(index, head) {
    change({ layer: index, head, map: 1 });
    const layer = await getLayer(state.text, index), shade = shades(SHARES);
    const readout = readoutLine(), share = (i, j) => weight(layer, head, i, j);
    const map = heatMap({
      rows: tokens, columns: tokens, readout, label: `Attention of layer ${index}, head ${head}`,
      cells: tokenMap("cells", currentText()),
      describe: (i, j) =>
        [quote(tokens[i]), " looks at ", quote(tokens[j]), ` ${percent(share(i, j))}`],
      hint: "Point at a cell: the token of its row looks at the token of its column.",
      onpick: (token, key) => change({ token, key }),
    });
    const leave = (view, label) => button({
      class: "link", onclick: () => (dialog.close(), change({ view, heads: [head] })),
    }, label);
    dialog.replaceChildren(
      h("div", { class: "title" }, h("h2", {}, `Layer ${index}, head ${head}`),
        h("code", { title: "in Python" }, `view.maps[${index - 1}, ${head - 1}]`),
        legend("0%", "100%", SHARES), leave("head", "Head view"), leave("neuron", "Neuron view"),
        button({ class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "×")),
      map.element, readout);
    if (!dialog.open) dialog.showModal();
    markMore(map.element);
    map.focus();
    map.paint((i, j) => shade(share(i, j)));
    map.mark(state.token !== null && state.key !== null ? [state.token, state.key] : null);
  }

  let drawn = "";
  return async () => {
    const shade = shades(SHARES), { text } = state;
    if (drawn === colour("paper")) return; // What is chosen changes nothing here.
    drawn = colour("paper");
    if (state.map) open(state.layer, state.head); // also in new colours
    for (const index of range(1, count + 1)) {
      const layer = await getLayer(text, index);
      if (!grid.isConnected) return;
      drawLayer(layer, index, shade);
    }
    grid.dataset.done = "true";
  };
}
