// Heat maps: numbers as colours, with names on both axes.

/** Scales of shares from 0 to 1, of which small ones are to be seen too, and of numbers from −1 to 1. */
const SHARES = { names: ["ramp-0", "ramp-1", "ramp-2"], least: 0, place: Math.sqrt };
const SIGNED = { names: ["minus", "zero", "plus"], least: -1, place: (x) => (x + 1) / 2 };

/** Return a scale's colours: a function that returns the pixel of a number, for cells and legends. */
function shades({ names, place }) {
  const context = h("canvas", { width: 256, height: 1 }).getContext("2d");
  const gradient = context.createLinearGradient(0, 0, 256, 0);
  names.forEach((name, i) => gradient.addColorStop(i / (names.length - 1), colour(name)));
  context.fillStyle = gradient;
  context.fillRect(0, 0, 256, 1);
  const colours = new Uint32Array(context.getImageData(0, 0, 256, 1).data.buffer);
  return (x) => colours[Math.round(255 * clamp(place(x), 0, 1))];
}

/** Fill a canvas with a colour for each row and column. */
function paint(canvas, rows, columns, colourOf) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) pixels[i * columns + j] = colourOf(i, j);
  }
  context.putImageData(image, 0, 0);
}

/** Return a scale's legend: its colours, between what its ends mean. */
function legend(first, last, scale, title = "") {
  const canvas = h("canvas"), { least } = scale;
  canvas.draw = () => {
    const shade = shades(scale);
    paint(canvas, 1, 201, (_, i) => shade(least + ((1 - least) * i) / 200));
  };
  canvas.draw();
  const words = [title, first].filter(Boolean).map((text) => h("span", {}, text));
  return h("span", { class: "legend" }, ...words, canvas, h("span", {}, last));
}

/** What `tokenMap` draws for a pair, in words. */
const BOUNDARY = "Lines part the tokens of A from those of B.";

/** Return the attributes of a map of a text's tokens: its class, and where the second text starts. */
function tokenMap(name, { tokens, secondStart }) {
  const share = secondStart / tokens.length;
  return share < 1 ? { class: `${name} pair`, style: `--start: ${percent(share)}` } : { class: name };
}

/**
 * Return a heat map: its element, `paint` by a function of row and column, and `mark` for a cell.
 * `rows` and `columns` are names, `size` is of a cell in pixels. `readout` says what `describe`
 * returns for a cell, as nodes, and `hint` for none; `onpick` is called for a cell that is clicked
 * or reached with the arrow keys; `cells` are attributes.
 */
function heatMap({ rows, columns, size, label, describe, readout, hint, onpick, cells }) {
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `${label}; arrow keys move` });
  const cursor = h("i", { class: "cursor", hidden: true });
  const left = axis(rows, "left"), top = axis(columns, "top");
  size ??= clamp(Math.floor(680 / columns.length), 12, 34);
  let chosen = null;

  /** Show where a cell is on both axes, and say what is in it. */
  function show(cell) {
    for (const each of [...left.children, ...top.children]) each.classList.remove("on");
    cursor.hidden = !cell;
    readout.replaceChildren(...(cell ? describe(...cell) : [hint]));
    if (!cell) return;
    const [i, j] = cell;
    cursor.style.transform = `translate(${j * size}px, ${i * size}px)`;
    left.children[i].classList.add("on");
    top.children[j].classList.add("on");
  }

  /** Return the cell below the pointer. */
  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const index = (share, count) => clamp(Math.floor(share * count), 0, count - 1);
    return [
      index((event.clientY - box.top) / box.height, rows.length),
      index((event.clientX - box.left) / box.width, columns.length),
    ];
  }

  /** Choose a cell for good. */
  function pick(i, j) {
    chosen = [clamp(i, 0, rows.length - 1), clamp(j, 0, columns.length - 1)];
    show(chosen);
    onpick(...chosen);
  }

  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    show(cell);
    showTip(event, describe(...cell));
  });
  canvas.addEventListener("pointerleave", () => (hideTip(), show(chosen)));
  canvas.addEventListener("click", (event) => pick(...cellAt(event)));
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const [i, j] = chosen ?? [0, 0], [down, right] = chosen ? steps[event.key] : [0, 0];
    pick(i + down, j + right);
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  const [width, height] = [size * columns.length, size * rows.length];
  const style = `--cell: ${size}px; --width: ${width}px; --height: ${height}px`;
  return {
    element: h("div", { class: "heatmap box", style }, h("span", { class: "corner" }), top, left,
      h("div", cells ?? { class: "cells" }, canvas, cursor)),
    focus: () => canvas.focus({ preventScroll: true }),
    mark: (cell) => show((chosen = cell)),
    paint: (colourOf) => paint(canvas, rows.length, columns.length, colourOf),
  };
}

/** Return the names along a side of a heat map. */
function axis(names, side) {
  const isShort = names.every((name) => name.length < 3);
  return h("div", { class: `names ${side} ${isShort ? "short" : ""}`, "aria-hidden": "true" },
    ...names.map((name) => h("span", {}, say(name))));
}

const tip = h("div", { class: "tip", "aria-hidden": "true", hidden: true });

/** Show nodes beside the pointer. */
function showTip(event, nodes) {
  const home = event.target.closest("dialog") ?? document.body; // a dialog is above the page
  if (tip.parentNode !== home) home.append(tip);
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect(), below = event.clientY + 18;
  tip.style.left = `${clamp(event.clientX + 14, 4, innerWidth - width - 4)}px`;
  tip.style.top = `${below + height < innerHeight ? below : event.clientY - height - 12}px`;
}

const hideTip = () => (tip.hidden = true);
