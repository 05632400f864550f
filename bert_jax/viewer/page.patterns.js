// Patterns view: the share of each head's attention that goes to each kind of token.

/** Build the patterns view. */
function openPatterns(panel) {
  const { names, explanations, values, uniform, texts, tokens, truncated } = data.patterns;
  const shown = names.filter((name) => values[name].flat().some((value) => value !== null));
  const readout = readoutLine(), body = h("tbody");
  const counted = (list) => list.map((_, i) => String(i + 1));
  const layerNames = counted(values[shown[0]]), headNames = counted(values[shown[0]][0]);
  const rows = layerNames.flatMap((_, i) => headNames.map((_, j) => ({
    layer: i + 1, head: j + 1, ...Object.fromEntries(shown.map((name) => [name, values[name][i][j]])),
  })));
  const title = (name) => ({ cls: "[CLS]", sep: "[SEP]" })[name] ?? name.replaceAll("_", " ");
  const format = (value) => (value === null ? "–" : percent(value));
  const maps = shown.map((name) => heatMap({
    rows: layerNames, columns: headNames, size: headNames.length > 12 ? 16 : 20, readout,
    label: `${title(name)} by layer and head`,
    hint: "Point at a cell to read it; click to find its head in the table.",
    describe: (i, j) => [`Layer ${i + 1}, head ${j + 1}: ${title(name)} ${format(values[name][i][j])}`],
    onpick: (i, j) => find(i + 1, j + 1),
  }));
  const even = (name) =>
    name === "broad" ? "" : ` A head that looks evenly: ${format(uniform[name])}.`;
  const figures = shown.map((name, n) => h("figure", {}, h("h2", {}, title(name)), maps[n].element,
    h("figcaption", {}, explanations[name], even(name))));
  const columns = ["layer", "head", ...shown], sort = { column: "layer", down: false };
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  const headers = columns.map((column) => h("th", {
    scope: "col", class: shown.includes(column) ? "share" : "number",
  }, button({ title: explanations[column] ?? "", onclick: () => sortBy(column) }, title(column))));
  panel.append(
    h("div", { class: "hint" }, `Means over ${count(texts, "text")} with ${count(tokens, "token")}` +
      `${truncated ? `; ${count(truncated, "text")} truncated to the model’s positions` : ""}. `,
      "In each map a row is a layer and a column a head. All have one scale.",
      legend("0%", "100%", SHARES)),
    h("section", {}, h("div", { class: "patterns" }, ...figures), readout),
    h("h2", {}, "All heads"),
    h("div", { class: "box tall" }, h("table", { class: "sortable" },
      h("thead", {}, h("tr", {}, ...headers)), body)));

  /** Sort the table by a column: shares from the largest, and the other way round a second time. */
  function sortBy(column) {
    sort.down = sort.column === column ? !sort.down : shown.includes(column);
    sort.column = column;
    drawTable();
  }

  /** Draw the table in its order. */
  function drawTable() {
    const { column, down } = sort, value = (row) => row[column] ?? -1;
    rows.sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)));
    headers.forEach((header, i) => {
      const order = columns[i] === column ? (down ? "descending" : "ascending") : "none";
      header.setAttribute("aria-sort", order);
    });
    body.replaceChildren(...rows.map((row) => h("tr", { id: `head-${row.layer}-${row.head}` },
      h("td", { class: "number" }, String(row.layer)), h("td", { class: "number" }, String(row.head)),
      ...shown.map((name) => h("td", {
        class: "number share", style: `--share: ${row[name] ?? 0}`,
      }, format(row[name]))))));
  }

  /** Show a head in the table. */
  function find(layer, head) {
    body.querySelector(".on")?.classList.remove("on");
    const row = document.getElementById(`head-${layer}-${head}`), box = body.closest(".box");
    row.classList.add("on");
    box.scrollTop = row.offsetTop - box.clientHeight / 2;
  }

  drawTable();
  for (const map of maps) map.mark(null);
  return () => {
    const shade = shades(SHARES);
    shown.forEach((name, n) => {
      const shares = values[name];
      maps[n].paint((i, j) => (shares[i][j] === null ? 0 : shade(shares[i][j])));
    });
  };
}
