// Patterns view: the share of each head's attention that goes to each kind of token.

/** Build the patterns view. */
function openPatterns(panel) {
  const { names, explanations, values, uniform, texts, tokens } = data.patterns;
  const shown = names.filter((name) => values[name].flat().some((value) => value !== null));
  const [layerNames, headNames] = [values[shown[0]], values[shown[0]][0]].map((list) => list.map((_, i) => String(i + 1)));
  const readout = h("p", { class: "readout", role: "status" });
  const rows = layerNames.flatMap((_, layer) => headNames.map((_, head) => ({
    layer: layer + 1, head: head + 1, ...Object.fromEntries(shown.map((name) => [name, values[name][layer][head]])),
  })));
  const largest = (name) => Math.max(...rows.map((row) => row[name] ?? 0), 1e-9);
  const title = (name) => ({ cls: "[CLS]", sep: "[SEP]" })[name] ?? name.replaceAll("_", " ");
  const format = (value) => (value === null ? "–" : value.toFixed(3));
  const maps = shown.map((name) => {
    const map = heatMap({
      rows: layerNames, columns: headNames, cell: headNames.length > 16 ? 12 : 18, readout,
      label: `${title(name)} by layer and head; arrow keys move`,
      hint: "Point at a cell to read it; click to find its head in the table.",
      describe: (i, j) => [`Layer ${i + 1}, head ${j + 1}: ${title(name)} ${format(values[name][i][j])}`],
      onpick: (i, j) => point(i + 1, j + 1),
    });
    const figure = h("figure", {}, h("h3", {}, title(name)), map.element,
      h("figcaption", {}, legend("0", format(largest(name)), SHARES), h("p", {}, explanations[name],
        uniform[name] === null ? "" : ` With even attention: ${format(uniform[name])}.`)));
    return { name, map, figure };
  });
  const body = h("tbody");
  const columns = ["layer", "head", ...shown];
  const sort = { column: "layer", down: false };
  const headers = columns.map((column) =>
    h("th", { scope: "col" }, h("button", {
      type: "button", title: explanations[column] ?? "", onclick: () => sortBy(column),
    }, title(column))));
  panel.append(
    h("p", { class: "hint" }, `Means over ${texts.toLocaleString("en")} texts of ${tokens.toLocaleString("en")} tokens. `,
      "In each map a row is a layer and a column a head."),
    h("section", {}, h("div", { class: "patterns" }, ...maps.map(({ figure }) => figure)), readout),
    h("h2", {}, "All heads"),
    h("div", { class: "box tall" }, h("table", { class: "sortable" }, h("thead", {}, h("tr", {}, ...headers)), body)));

  /** Sort the table by a column: shares from the largest, and the other way round a second time. */
  function sortBy(column) {
    const isNumber = column !== "layer" && column !== "head";
    Object.assign(sort, { down: sort.column === column ? !sort.down : isNumber, column });
    drawTable();
  }

  /** Draw the table in its order. */
  function drawTable() {
    const value = (row) => row[sort.column] ?? -Infinity;
    const sorted = [...rows].sort((a, b) => (sort.down ? value(b) - value(a) : value(a) - value(b)));
    headers.forEach((header, i) => {
      if (columns[i] === sort.column) header.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    body.replaceChildren(...sorted.map((row) =>
      h("tr", { id: `head-${row.layer}-${row.head}` }, ...columns.map((column, i) => (i < 2
        ? h("td", { class: "number" }, String(row[column]))
        : h("td", { class: "number share", style: `--share: ${(row[column] ?? 0) / largest(column)}` }, format(row[column])))))));
  }

  /** Show a head in the table. */
  function point(layer, head) {
    body.querySelector(".on")?.classList.remove("on");
    const row = document.getElementById(`head-${layer}-${head}`), box = body.closest(".box");
    row.classList.add("on");
    box.scrollTop = row.offsetTop - box.clientHeight / 2;
  }

  drawTable();
  return () => {
    const colours = palette(SHARES);
    for (const { name, map } of maps) {
      map.paint((i, j) => (values[name][i][j] === null ? 0 : tint(colours, visible(values[name][i][j] / largest(name)))));
    }
  };
}
