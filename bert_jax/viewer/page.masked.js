// Masked view: what the masked LM head guesses from each layer.

/** Build the masked view. */
function openMasked(panel) {
  const { tokens, guesses, layers: last, vocabSize } = currentText();
  const even = `${vocabSize.toLocaleString("en")} = ${(100 / vocabSize).toPrecision(2)}%`;
  panel.append(h("p", { class: "hint" }, Object.keys(guesses).length
    ? "The most probable tokens for each [MASK]. The last layer’s are the model’s guesses; those " +
      "of the layers before, by the same masked LM head, show how they form. If all tokens of the " +
      `vocabulary were equally probable, each would have 1 / ${even}.`
    : "This text has no [MASK]."));
  for (const [index, byLayer] of Object.entries(guesses)) {
    const ranks = byLayer[0].map((_, i) => h("th", { scope: "col" }, `${ordinal(i + 1)} guess`));
    const rows = byLayer.map((best, layer) => h("tr", { class: layer === last ? "last" : "" },
      h("th", { scope: "row" }, layer ? `Layer ${layer}` : "Embeddings"),
      ...best.map(([token, probability]) =>
        h("td", { class: "guess", style: `--share: ${probability}` },
          h("span", { class: "percent" }, percent(probability)), say(token)))));
    panel.append(h("h2", {}, ...inContext(tokens, Number(index))),
      h("div", { class: "box" }, h("table", { class: "guesses" },
        h("thead", {}, h("tr", {}, h("td"), ...ranks)), h("tbody", {}, ...rows))));
  }
  return () => {};
}

const ordinal = (n) => `${n}${["st", "nd", "rd"][n - 1] ?? "th"}`; // up to 20

/** Return the tokens around an index, which is marked. */
function inContext(tokens, index) {
  const first = Math.max(0, index - 6), end = Math.min(tokens.length, index + 7);
  const words = range(first, end).flatMap((i) =>
    [i === index ? h("mark", {}, say(tokens[i])) : say(tokens[i]), " "]);
  return [first ? "… " : "", ...words, end < tokens.length ? "…" : ""];
}
