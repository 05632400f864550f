// Masked view: what the masked LM head guesses from each layer.

/** Build the masked view. */
function openMasked(panel) {
  const { tokens, guesses, layers: last } = currentText();
  panel.append(h("p", { class: "hint" }, Object.keys(guesses).length
    ? "The most probable tokens for each [MASK]. The last layer’s are the model’s guesses; those " +
      "of the layers before, by the same masked LM head, show how they form."
    : "This text has no [MASK]."));
  for (const [index, byLayer] of Object.entries(guesses)) {
    const ranks = byLayer[0].map((_, i) => h("th", { scope: "col" }, `${i + 1}.`));
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

/** Return the tokens around an index, which is marked. */
function inContext(tokens, index) {
  const first = Math.max(0, index - 6), end = Math.min(tokens.length, index + 7);
  const words = range(first, end).flatMap((i) =>
    [i === index ? h("mark", {}, say(tokens[i])) : say(tokens[i]), " "]);
  return [first ? "… " : "", ...words, end < tokens.length ? "…" : ""];
}
