// Heat maps: numbers as colours, with names on both axes.

/** Return 256 colours along a gradient of colours of page.css, as pixels of a canvas. */
function palette(names) {
  const canvas = h("canvas", { width: 256, height: 1 }), context = canvas.getContext("2d");
  const gradient = context.createLinearGradient(0, 0, 256, 0);
  names.forEach((name, i) => gradient.addColorStop(i / (names.length - 1), colour(name)));
  context.fillStyle = gradient;
  context.fillRect(0, 0, 256, 1);
  return new Uint32Array(context.getImageData(0, 0, 256, 1).data.buffer);
}

/** The names of the colours of shares, from 0 on, and of numbers below and above 0. */
const SHARES = ["ramp-0", "ramp-1", "ramp-2"];
const SIGNED = ["minus", "zero", "plus"];

/** Return a palette's colour of a number from 0 to 1. */
const tint = (colours, x) => colours[Math.round(255 * Math.min(1, Math.max(0, x)))];

/** Return a palette's place for a weight: small ones are to be seen too. */
const visible = (share) => Math.sqrt(share);

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

/** Return a scale: its colours between what its ends mean. */
function legend(first, last, names, title = "") {
  const stops = names.map((name) => `var(--${name})`);
  if (names === SHARES) stops[1] += " 25%"; // the square of a half, as `visible` has it
  return h("span", { class: "legend" }, title ? h("span", {}, title) : "", h("span", {}, first),
    h("i", { style: `background: linear-gradient(to right, ${stops.join()})` }), h("span", {}, last));
}

/**
 * Return a heat map with `rows` and `columns` as names: its element, `paint` by a function of row
 * and column, and `mark` to choose a cell. `readout` says what is in a cell, with the nodes that
 * `describe` returns, or `hint` for none; `onpick` is called for a cell that is clicked, or reached
 * with the arrow keys.
 */
function heatMap({ rows, columns, label, cell, describe, readout, hint, onpick }) {
  const size = cell ?? Math.max(12, Math.min(34, Math.floor(680 / columns.length)));
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": label });
  const cursor = h("i", { class: "cursor", hidden: true });
  const names = (texts, kind) => h("div", { class: `names ${kind}${texts.every((text) => text.length < 3) ? " short" : ""}`, "aria-hidden": true }, ...texts.map((text) =>
    h("span", {}, say(text))));
  const left = names(rows, "left"), top = names(columns, "top");
  let chosen = null;

  /** Show a cell's place on both axes, and say what is in it. */
  function show(at) {
    for (const each of [...left.children, ...top.children]) each.classList.remove("on");
    cursor.hidden = !at;
    if (!at) return readout.replaceChildren(hint);
    const [i, j] = at;
    cursor.style.transform = `translate(${j * size}px, ${i * size}px)`;
    left.children[i].classList.add("on");
    top.children[j].classList.add("on");
    readout.replaceChildren(...describe(i, j));
  }

  /** Return the cell below the pointer. */
  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const index = (offset, extent, count) => Math.min(count - 1, Math.max(0, Math.floor((offset / extent) * count)));
    return [
      index(event.clientY - box.top, box.height, rows.length),
      index(event.clientX - box.left, box.width, columns.length),
    ];
  }

  canvas.addEventListener("pointermove", (event) => {
    const at = cellAt(event);
    show(at);
    showTip(event, describe(...at));
  });
  canvas.addEventListener("pointerleave", () => (hideTip(), show(chosen)));
  canvas.addEventListener("click", (event) => onpick(...(chosen = cellAt(event))));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [i, j] = chosen ?? [0, 0], moved = chosen ? step : [0, 0];
    chosen = [Math.min(rows.length - 1, Math.max(0, i + moved[0])), Math.min(columns.length - 1, Math.max(0, j + moved[1]))];
    show(chosen);
    onpick(...chosen);
  });
  const element = h("div", {
    class: "heatmap box",
    style: `--cell: ${size}px; --width: ${size * columns.length}px; --height: ${size * rows.length}px`,
  }, h("span", { class: "corner" }), top, left, h("div", { class: "cells" }, canvas, cursor));
  return {
    element,
    mark: (at) => show((chosen = at)),
    paint: (colourOf) => (paint(canvas, rows.length, columns.length, colourOf), show(chosen)),
  };
}

const tip = h("div", { class: "tip", "aria-hidden": true, hidden: true });

/** Show nodes beside the pointer. */
function showTip(event, nodes) {
  const home = event.target.closest("dialog") ?? document.body;
  if (tip.parentNode !== home) home.append(tip);
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4));
  const y = event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18;
  tip.style.left = `${x}px`;
  tip.style.top = `${y}px`;
}

const hideTip = () => (tip.hidden = true);
