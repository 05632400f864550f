// Head view: the tokens twice, and lines from each query to the keys that it attends to.

/** Which queries and keys of a pair are shown: each a text, or both. */
const DIRECTIONS = { all: ["AB", "AB"], AB: ["A", "B"], BA: ["B", "A"], AA: ["A", "A"], BB: ["B", "B"] };

/** Return where the tokens of text "A" or "B", or of "AB", start and end. */
function span(part) {
  const { tokens, secondStart } = currentText();
  return { A: [0, secondStart], B: [secondStart, tokens.length], AB: [0, tokens.length] }[part];
}

/** Build the head view. */
function openHeads(panel) {
  const { tokens, heads, secondStart } = currentText(), isPair = secondStart < tokens.length;
  const row = tokens.length > 48 ? 22 : 28, gap = isPair ? 18 : 0;
  const rowCentre = (i) => (i + 0.5) * row + (isPair && i >= secondStart ? gap : 0);
  const isOn = (head) => state.heads?.includes(head) ?? true;
  const shownHeads = () => range(1, heads + 1).filter(isOn);
  const widest = Math.min(18, Math.max(...tokens.map((token) => [...token].length)) + 1);
  const columns = { token: tokenColumn("query"), key: tokenColumn("key") };
  const background = h("canvas"), foreground = h("canvas");
  const readout = h("p", { class: "readout", role: "status" });
  const swatches = headSwatches(heads, isOn, (chosen) => change({ heads: chosen }));
  let layer = null, hovered = null;

  /** Return the tokens as a list of queries or keys. */
  function tokenColumn(kind) {
    const name = kind === "query" ? "token" : "key", other = kind === "query" ? "key" : "token";
    const items = tokens.map((token, i) =>
      h("li", {
        role: "option", class: i && i === secondStart ? "b-first" : "", title: token,
        onmouseenter: () => point({ [name]: i }), onmouseleave: () => point(null),
        onclick: () => change({ [name]: state[name] === i ? null : i, [other]: null }),
        onblur: () => point(null),
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") event.currentTarget.click();
          else if (event.key === "ArrowRight") columns.key.items[i].focus();
          else if (event.key === "ArrowLeft") columns.token.items[i].focus();
          else if (event.key === "Escape") change({ token: null, key: null });
          else return;
          event.preventDefault();
          event.stopImmediatePropagation();
        },
      }, say(token), h("span", { class: "percent" }), h("span", { class: "bar", "aria-hidden": true })));
    rove(items, { start: state[name] ?? 0, onfocus: (i) => point({ [name]: i }) });
    const label = kind === "query" ? "Queries: tokens that look" : "Keys: tokens that are looked at";
    return { items, element: h("ul", { class: `column ${kind}`, role: "listbox", "aria-label": label }, ...items) };
  }

  /** Show a token for as long as it is pointed at. */
  function point(token) {
    hovered = token;
    drawChosen();
  }

  /** Return the lines of some queries and keys, as far as the direction has them. */
  function lines(queries, keys, least) {
    const found = [], [[q0, q1], [k0, k1]] = DIRECTIONS[state.direction].map(span);
    for (const head of shownHeads()) {
      for (const query of queries) {
        for (const key of keys) {
          if (query < q0 || query >= q1 || key < k0 || key >= k1) continue;
          const share = weight(layer, head, query, key);
          if (share >= least) found.push({ head, query, key, share });
        }
      }
    }
    return found;
  }

  /** Draw lines on a canvas; those of a head and of about a weight are one path. */
  function drawLines(canvas, drawn, strength) {
    const { clientWidth: width, clientHeight: height } = canvas;
    const ratio = Math.min(devicePixelRatio, 16000 / height), context = canvas.getContext("2d");
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    context.scale(ratio, ratio);
    const paths = new Map(), levels = 10, bend = width * 0.45;
    // The heads' lines are side by side in a row.
    const places = new Map(shownHeads().map((head, i, { length }) =>
      [head, ((i + 0.5) / length - 0.5) * row * 0.5]));
    for (const { head, query, key, share } of drawn) {
      const name = head * levels + Math.min(levels - 1, Math.floor(share * levels));
      if (!paths.has(name)) paths.set(name, new Path2D());
      const path = paths.get(name), place = places.get(head);
      const from = rowCentre(query) + place, to = rowCentre(key) + place;
      path.moveTo(0, from);
      path.bezierCurveTo(bend, from, width - bend, to, width, to);
    }
    const hues = range(0, HUES).map((i) => colour(`head-${i}`));
    for (const [name, path] of paths) {
      const head = Math.floor(name / levels), share = ((name % levels) + 0.5) / levels;
      context.strokeStyle = hues[(head - 1) % HUES];
      context.setLineDash(DASHES[headRound(head)]);
      context.globalAlpha = Math.min(1, strength * share);
      context.lineWidth = 0.75 + 2 * share;
      context.stroke(path);
    }
  }

  /** Draw what the chosen token attends to, or what attends to the chosen key. */
  function drawChosen() {
    if (!layer) return;
    const { token, key } = hovered ?? state, all = range(0, tokens.length);
    const isQuery = token != null, chosen = isQuery ? token : key ?? null;
    const drawn = chosen === null ? [] : lines(isQuery ? [chosen] : all, isQuery ? all : [chosen], 0);
    background.classList.toggle("faint", chosen !== null);
    drawLines(foreground, drawn.filter(({ share }) => share >= 0.005), 1.6);
    columns.token.items.forEach((item, i) => item.setAttribute("aria-selected", String(isQuery && i === chosen)));
    columns.key.items.forEach((item, i) => item.setAttribute("aria-selected", String(!isQuery && i === chosen)));
    showShares(columns.token.items, isQuery ? [] : drawn, "query");
    showShares(columns.key.items, isQuery ? drawn : [], "key");
    readout.replaceChildren(...(chosen === null ? hint() : summary(chosen)));
  }

  /** Write the mean share over the heads beside each token, and draw each head's part of it. */
  function showShares(items, drawn, side) {
    const parts = items.map(() => []), count = shownHeads().length;
    for (const line of drawn) parts[line[side]].push(line);
    items.forEach((item, i) => {
      const [, number, bar] = item.children, stops = [];
      let sum = 0;
      for (const { head, share } of parts[i]) {
        const hue = `var(--head-${(head - 1) % HUES})`;
        stops.push(`${hue} ${(100 * sum) / count}% ${(100 * (sum += share)) / count}%`);
      }
      number.textContent = parts[i].length ? percent(sum / count) : "";
      bar.style.backgroundImage = stops.length
        ? `linear-gradient(to right, ${stops.join()}, transparent ${(100 * sum) / count}%)` : "";
    });
  }

  /** Return what a token attends to and what attends to it, in words. */
  function summary(index) {
    const all = range(0, tokens.length), count = shownHeads().length;
    const list = (found, side) => {
      const sums = new Map();
      for (const line of found) sums.set(line[side], (sums.get(line[side]) ?? 0) + line.share / count);
      const best = [...sums].filter(([, share]) => share >= 0.0005).sort((a, b) => b[1] - a[1]).slice(0, 6);
      if (!best.length) return ["nothing here"];
      return best.flatMap(([i, share], n) => [n ? ", " : "", quote(tokens[i]), ` ${percent(share)}`]);
    };
    const mean = count === 1 ? `head ${shownHeads()[0]}` : `mean of ${count} heads`;
    return [
      quote(tokens[index]), ` (token ${index + 1}, layer ${state.layer}, ${mean}) looks at `,
      ...list(lines([index], all, 0), "key"), ". Looked at by ",
      ...list(lines(all, [index], 0), "query"), ".",
    ];
  }

  /** Return what can be done here, where no token is chosen. */
  const hint = () => [
    shownHeads().length
      ? "Point at a token on the left to see where it looks, on the right to see who looks at it; click to keep it."
      : "No head is on. Choose some above.",
  ];

  panel.append(
    h("div", { class: "controls" }, layerControl(1), swatches, ...(isPair ? [choice("From → to", [
      ["all", "All"], ["AB", "A→B"], ["BA", "B→A"], ["AA", "A→A"], ["BB", "B→B"],
    ], state.direction, (direction) => change({ direction }))] : [])),
    h("div", {
      class: "heads",
      style: `--row: ${row}px; --gap: ${gap}px; --token: ${widest}ch`,
    },
    h("p", { class: "caption" }, "Queries look …"), h("span"), h("p", { class: "caption" }, "… at keys"),
    columns.token.element, h("div", { class: "lines", "aria-hidden": true }, background, foreground), columns.key.element),
    readout);

  return (loaded) => {
    layer = loaded;
    swatches.refresh();
    const all = range(0, tokens.length), [[q0, q1], [k0, k1]] = DIRECTIONS[state.direction].map(span);
    columns.token.items.forEach((item, i) => item.classList.toggle("outside", i < q0 || i >= q1));
    columns.key.items.forEach((item, i) => item.classList.toggle("outside", i < k0 || i >= k1));
    // Thousands of faint lines would only hide the others.
    drawLines(background, lines(all, all, tokens.length > 64 ? 0.05 : 0.01), 0.9);
    drawChosen();
  };
}

/** Return buttons that turn heads on and off; a double click leaves one. */
function headSwatches(count, isOn, onchange) {
  const all = range(1, count + 1);
  const buttons = all.map((head) =>
    h("button", {
      type: "button", role: "checkbox", "aria-label": `Head ${head}`, style: headStyle(head),
      title: "Click: on or off. Double click: only this one.",
      onclick: () => onchange(all.filter((each) => (each === head ? !isOn(each) : isOn(each)))),
      ondblclick: () => onchange([head]),
    }, String(head)));
  rove(buttons);
  const some = (label, chosen) => h("button", { type: "button", class: "link", onclick: () => onchange(chosen) }, label);
  const element = h("div", { class: "control" }, h("span", {}, "Heads"),
    h("div", { class: "swatches", role: "group", "aria-label": "Heads" }, ...buttons), some("all", null), some("none", []));
  element.refresh = () => buttons.forEach((button, i) => button.setAttribute("aria-checked", String(isOn(i + 1))));
  return element;
}
