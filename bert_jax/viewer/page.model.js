// Model view: the maps of all layers and heads, small; one opens large.

const LARGEST_SMALL_MAP = 64; // pixels

/** Build the model view. */
function openModel(panel) {
  const { tokens, layers: count, heads } = currentText();
  const small = Math.min(tokens.length, LARGEST_SMALL_MAP);
  const names = range(1, count + 1).map((layer) => range(1, heads + 1).map((head) => ({ layer, head })));
  const buttons = names.flat().map(({ layer, head }) =>
    h("button", {
      type: "button", class: "small-map", "aria-label": `Layer ${layer}, head ${head}`,
      onclick: () => openMap(layer, head),
    }, h("canvas", { width: small, height: small })));
  rove(buttons, { columns: heads, start: (Math.max(1, state.layer) - 1) * heads + state.head - 1 });
  const grid = h("div", { class: "box" }, h("div", { class: "maps", style: `--heads: ${heads}` },
    h("span", { class: "corner" }, "Layer ╲ head"), ...range(1, heads + 1).map((head) => h("span", {}, String(head))),
    ...names.flatMap((row, i) => [h("span", {}, String(i + 1)), ...buttons.slice(i * heads, (i + 1) * heads)])));
  const dialog = h("dialog", { class: "map", onclose: () => change({ map: null }) });
  panel.append(
    h("p", { class: "hint" }, "A small square is the map of a head: a row for each query, a column for each key. ",
      "Open one to read it. ", legend("0%", "100%", SHARES)),
    grid, dialog);

  /** Draw the maps of a layer; a pixel is the largest of the weights that it stands for. */
  function drawLayer(layer, index, colours) {
    for (const head of range(1, heads + 1)) {
      const button = buttons[(index - 1) * heads + head - 1], { length } = tokens;
      const largest = new Float32Array(small * small), received = new Float32Array(length);
      for (let query = 0; query < length; query++) {
        const row = Math.floor((query * small) / length) * small;
        for (let key = 0; key < length; key++) {
          const share = weight(layer, head, query, key), pixel = row + Math.floor((key * small) / length);
          if (share > largest[pixel]) largest[pixel] = share;
          received[key] += share / length;
        }
      }
      paint(button.firstChild, small, small, (i, j) => tint(colours, visible(largest[i * small + j])));
      const most = received.indexOf(Math.max(...received));
      const about = `Layer ${index}, head ${head}: looks most at ${tokens[most]}, ${percent(received[most])} on average`;
      button.setAttribute("aria-label", about);
      button.title = about;
    }
  }

  /** Show one map large. */
  async function openMap(index, head) {
    change({ layer: index, head, map: 1 });
    const layer = await getLayer(state.text, index);
    const readout = h("p", { class: "readout", role: "status" });
    const link = (view, label) => h("button", {
      type: "button", class: "link",
      onclick: () => (dialog.close(), change({ view, layer: index, head, heads: view === "head" ? [head] : state.heads })),
    }, label);
    const map = heatMap({
      rows: tokens, columns: tokens, readout, label: `Attention of layer ${index}, head ${head}; arrow keys move`,
      describe: (i, j) => [quote(tokens[i]), " looks at ", quote(tokens[j]), ` ${percent(weight(layer, head, i, j))}`],
      hint: "Point at a cell: its row looks at its column.", onpick: (token, key) => change({ token, key }),
    });
    dialog.replaceChildren(
      h("div", { class: "title" }, h("h2", {}, `Layer ${index}, head ${head}`), legend("0%", "100%", SHARES),
        link("head", "Head view"), link("neuron", "Neuron view"),
        h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "×")),
      map.element, readout);
    if (!dialog.open) dialog.showModal();
    map.element.querySelector("canvas").focus();
    const colours = palette(SHARES);
    map.paint((i, j) => tint(colours, visible(weight(layer, head, i, j))));
    map.mark(state.token !== null && state.key !== null ? [state.token, state.key] : null);
  }

  let drawn = "";
  return async () => {
    const scheme = colour("paper");
    if (drawn === scheme) return;
    drawn = scheme;
    const colours = palette(SHARES), { text } = state;
    if (state.map && !dialog.open) openMap(Math.max(1, state.layer), state.head);
    for (let index = 1; index <= count; index++) {
      const layer = await getLayer(text, index);
      if (!panel.contains(grid)) return;
      drawLayer(layer, index, colours);
    }
    grid.dataset.done = "true";
  };
}
