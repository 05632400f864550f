// Head view: the tokens twice, and lines from each query to the keys that it attends to.

/** Which queries and which keys of a pair are shown: those of a text, or of both. */
const DIRECTIONS = {
  all: ["AB", "AB"], AB: ["A", "B"], BA: ["B", "A"], AA: ["A", "A"], BB: ["B", "B"],
};

/** How many lines are drawn at most: more would only hide each other, and take seconds. */
const MOST_LINES = 2500;

/** Build the head view. */
function openHeads(panel) {
  const { tokens, heads, secondStart, special: specialIndices } = currentText(), { length } = tokens;
  const isPair = secondStart < length, all = range(0, length);
  const row = length > 48 ? 22 : 28, gap = isPair ? 18 : 0; // heights, in pixels
  const special = new Set(specialIndices);
  const specialNames = `${tokens[0]} and ${tokens[length - 1]}`;
  const centre = (i) => (i + 0.5) * row + (i >= secondStart ? gap : 0);
  const isOn = (head) => state.heads?.includes(head) ?? true;
  const shownHeads = () => range(1, heads + 1).filter(isOn);
  const queries = tokenColumn("query", "token", "key"), keys = tokenColumn("key", "key", "token");
  const background = h("canvas"), foreground = h("canvas"), readout = readoutLine();
  const buttons = headButtons("Heads", "checkbox", {
    isOn,
    onclick: (head) =>
      change({ heads: range(1, heads + 1).filter((each) => (each === head) !== isOn(each)) }),
    ondblclick: (head) => change({ heads: [head] }),
  });
  let layer = null, hovered = null, backgroundOf = "";

  /** Return the tokens as a list of queries or keys: `name` of the state is one, `other` is not. */
  function tokenColumn(kind, name, other) {
    const items = tokens.map((token, i) => h("li", {
      role: "option", class: i && i === secondStart ? "b-first" : "", title: token,
      onmouseenter: () => point({ [name]: i }), onmouseleave: () => point(null),
      onblur: () => point(null),
      onclick: () => change({ [name]: state[name] === i ? null : i, [other]: null }),
      onkeydown: (event) => press(event, i),
    }, say(token), h("span", { class: "percent" }), h("span", { class: "bar", "aria-hidden": "true" })));
    rove(items, { start: state[name] ?? 0, onfocus: (i) => point({ [name]: i }) });
    const label = kind === "query" ? "Queries: tokens that look" : "Keys: tokens that are looked at";
    items.list = h("ul", { class: `column ${kind}`, role: "listbox", "aria-label": label }, ...items);
    return items;
  }

  /** Keep a token, leave it, or go to the other column. */
  function press(event, i) {
    const actions = {
      Enter: () => event.currentTarget.click(), " ": () => event.currentTarget.click(),
      ArrowLeft: () => queries[i].focus(), ArrowRight: () => keys[i].focus(),
      Escape: () => change({ token: null, key: null }),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    actions[event.key]();
  }

  /** Show a token for as long as it is pointed at. */
  function point(token) {
    hovered = token;
    drawChosen();
  }

  /** Return whether a token is in a part of the direction: 0 for queries, 1 for keys. */
  function isInside(i, side) {
    return DIRECTIONS[state.direction][side].includes(i < secondStart ? "A" : "B");
  }

  /** Return the lines between some queries and keys, as far as the direction has them. */
  function lines(from, to, least = 0) {
    const found = [], inside = [from.filter((i) => isInside(i, 0)), to.filter((i) => isInside(i, 1))];
    for (const head of shownHeads()) {
      for (const query of inside[0]) {
        for (const key of inside[1]) {
          const share = weight(layer, head, query, key);
          if (share >= least) found.push({ head, query, key, share });
        }
      }
    }
    return found;
  }

  /** Return whether a line is not hidden. */
  const isShown = ({ query, key }) => !state.hide || !(special.has(query) || special.has(key));

  /** Draw lines on a canvas, the strongest on top; `fade` is how much a small weight fades. */
  function drawLines(canvas, drawn, fade) {
    const { clientWidth: width, clientHeight: height } = canvas, shown = shownHeads();
    const ratio = Math.min(devicePixelRatio, 16000 / height), context = canvas.getContext("2d");
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    context.scale(ratio, ratio);
    const bend = width * 0.45, hues = new Map(shown.map((head) => [head, colour(hueOf(head))]));
    const strongest = drawn.sort((a, b) => a.share - b.share).slice(-MOST_LINES);
    for (const { head, query, key, share } of strongest) {
      // The lines of the heads are side by side within a row.
      const shift = ((shown.indexOf(head) + 0.5) / shown.length - 0.5) * row * 0.5;
      const from = centre(query) + shift, to = centre(key) + shift;
      context.strokeStyle = hues.get(head);
      context.setLineDash(DASHES[dashOf(head)]);
      context.globalAlpha = share ** fade;
      context.lineWidth = 0.75 + 2 * share;
      context.beginPath();
      context.moveTo(0, from);
      context.bezierCurveTo(bend, from, width - bend, to, width, to);
      context.stroke();
    }
  }

  /** Show what the chosen query attends to, or what attends to the chosen key. */
  function drawChosen() {
    if (!layer) return;
    const { token, key } = hovered ?? state, isQuery = token != null, chosen = token ?? key ?? null;
    const drawn = chosen === null ? [] : isQuery ? lines([chosen], all) : lines(all, [chosen]);
    background.classList.toggle("faint", chosen !== null);
    drawLines(foreground, drawn.filter((line) => line.share >= 0.005 && isShown(line)), 0.5);
    queries.forEach((item, i) => item.setAttribute("aria-selected", isQuery && i === chosen));
    keys.forEach((item, i) => item.setAttribute("aria-selected", !isQuery && i === chosen));
    showShares(queries, isQuery ? [] : drawn, "query");
    showShares(keys, isQuery ? drawn : [], "key");
    const isHint = chosen === null || !shownHeads().length;
    readout.replaceChildren(...(isHint ? [hint()] : summary(chosen)));
  }

  /** Write the mean share of the heads beside each token, and draw each head's part of it. */
  function showShares(items, drawn, side) {
    const parts = items.map(() => []), count = shownHeads().length;
    for (const line of drawn) parts[line[side]].push(line);
    items.forEach((item, i) => {
      const [, text, bar] = item.children, stops = [];
      let sum = 0;
      for (const { head, share } of parts[i]) {
        const start = sum;
        sum += share / count;
        stops.push(`var(--${hueOf(head)}) ${percent(start)} ${percent(sum)}`);
      }
      text.textContent = stops.length ? percent(sum) : "";
      stops.push(`transparent ${percent(sum)}`);
      bar.style.backgroundImage = sum ? `linear-gradient(to right, ${stops.join()})` : "";
    });
  }

  /** Return what a token attends to, and what attends to it, in words. */
  function summary(index) {
    const shown = shownHeads();
    const mean = shown.length === 1 ? `head ${shown}` : `mean of ${shown.length} heads`;
    const list = (verb, found, side) => {
      const sums = new Map();
      for (const line of found) {
        sums.set(line[side], (sums.get(line[side]) ?? 0) + line.share / shown.length);
      }
      const best = [...sums].filter(([, sum]) => sum >= 0.0005).sort((a, b) => b[1] - a[1]);
      return best.slice(0, 6).flatMap(([i, sum], n) =>
        [n ? ", " : ` ${verb} `, quote(tokens[i]), ` ${percent(sum)}`]);
    };
    return [
      quote(tokens[index]), ` (token ${index}, layer ${state.layer}, ${mean})`,
      ...list("looks at", lines([index], all), "key"), ". ",
      ...list("Looked at by", lines(all, [index]), "query"),
    ];
  }

  /** Return what can be done where no token is chosen. */
  const hint = () => shownHeads().length
    ? "Point at a token on the left to see where it looks, on the right to see who looks at it; " +
      "click to keep it. Double-click a head to see it alone."
    : "No head is on; choose some above.";

  for (const [label, chosen] of [["all", null], ["none", []]]) {
    const onclick = () => change({ heads: chosen });
    buttons.element.append(button({ class: "link", onclick }, label));
  }
  const about = `${tokens[0]} and the ${tokens[length - 1]} after A count as A, the last ` +
    `${tokens[length - 1]} as B; shares are not rescaled`;
  const options = Object.keys(DIRECTIONS).map((name) =>
    name === "all" ? [name, "All"] : [name, [...name].join("→"), about]);
  const hide = h("input", {
    type: "checkbox", checked: state.hide === 1,
    onchange: () => change({ hide: hide.checked ? 1 : null }),
  });
  const directions = choice("From → to", options, state.direction, (direction) =>
    change({ direction }));
  const meaning = h("p", { class: "hint" });
  const styles = `Colours ${heads > HUES ? "and dashes " : ""}tell the heads apart.`;
  // Measured: the letters of some scripts are twice as wide as a digit.
  const measure = h("canvas").getContext("2d"), { fontSize, fontFamily } = getComputedStyle(panel);
  measure.font = `600 ${fontSize} ${fontFamily}`;
  const widest = Math.max(...tokens.map((token) => measure.measureText(token).width));
  const sizes = `--row: ${row}px; --gap: ${gap}px; --token: min(18ch, ${Math.ceil(widest) + 1}px)`;
  panel.append(
    h("div", { class: "controls" }, layerControl(1), buttons.element, isPair ? directions : "",
      h("label", { class: "control" }, hide, `Hide ${specialNames}`)), meaning,
    h("div", { class: "heads", style: sizes },
      h("p", { class: "caption" }, "Queries look …"), h("span"),
      h("p", { class: "caption" }, "… at keys"), queries.list,
      h("div", { class: "lines", "aria-hidden": "true" }, background, foreground), keys.list),
    readout);

  return (loaded) => {
    layer = loaded;
    buttons.refresh();
    meaning.replaceChildren(`The larger a share, the wider and the more opaque its line. ${styles} `,
      state.hide ? `Lines of ${specialNames} are hidden; the percentages are the model’s.` : "");
    queries.forEach((item, i) => item.classList.toggle("outside", !isInside(i, 0)));
    keys.forEach((item, i) => item.classList.toggle("outside", !isInside(i, 1)));
    const { layer: index, heads, direction, hide } = state, { clientWidth } = background;
    const needed = [index, heads, direction, hide, clientWidth, colour("paper")].join();
    if (backgroundOf !== needed) {
      drawLines(background, lines(all, all, length > 64 ? 0.05 : 0.01).filter(isShown), 1);
      backgroundOf = needed;
    }
    drawChosen();
  };
}
