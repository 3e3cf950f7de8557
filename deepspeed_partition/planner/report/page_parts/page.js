"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const by = id => document.getElementById(id);
const KINDS = {F: "forward", f: "forward that keeps nothing", R: "forward again", B: "backward",
  I: "backward, to its input", W: "backward, to its weights", S: "transfer"};
const HUES = {F: "F", f: "F", R: "R", B: "B", I: "B", W: "W", S: "S"};
const TERMS = ["weights", "stash", "buffers", "transient", "fixed"];
const GUTTER = 104, AXIS = 24;
const HINT = "An arrow key or a click chooses an operation: its words stand here.";
const LAYER_HINT = "The left or right arrow key or a click chooses a layer: its words stand here.";

function seconds(value) {
  if (!value) return "0 s";
  for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]])
    if (Math.abs(value) >= factor) return Number((value / factor).toPrecision(4)) + " " + unit;
  return Number((value / 1e-9).toPrecision(3)) + " ns";
}
function bytes(value) {
  for (const [unit, factor] of [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (Math.abs(value) >= factor) return Number((value / factor).toPrecision(3)) + " " + unit;
  return value + " B";
}
function sums(deltas) { let sum = 0; return Float64Array.from(deltas, each => sum += each); }

// Colours are those of the style sheet, so that both themes hold for the canvases, too.
let hue = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "raised", "text", "dim", "edge", "idle", "ink", "paper", "limit", "select", "focus",
    "F", "R", "B", "W", "S", ...TERMS]) hue[name] = style.getPropertyValue("--" + name).trim();
  for (const name of "FRBWS") wordsOn[name] = contrast(hue[name], hue.ink) > contrast(hue[name], hue.paper) ? hue.ink : hue.paper;
}
const wordsOn = {};  // the colour of words on each kind of operation: dark or light, whichever is read better
function contrast(one, other) {  // as WCAG 2 defines it, of two colours #rrggbb
  const [a, b] = [one, other].map(colour => [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16) / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0.05));
  return Math.max(a, b) / Math.min(a, b);
}

// A run: for each lane, sorted by start, the numbers of names and micro-batches, starts and ends in seconds.
function unpack(run) {
  return run.lanes.map(lane => {
    const start = sums(lane.s).map(each => each * run.unit);
    return {name: lane.n, micro: lane.m, start, end: start.map((each, i) => each + lane.d[i] * run.unit)};
  });
}
function firstVisible(lane, time) {  // of those that have not ended
  let low = 0, high = lane.end.length;
  while (low < high) { const middle = (low + high) >> 1; lane.end[middle] < time ? low = middle + 1 : high = middle; }
  return low;
}

const shared = {from: 0, until: 1, views: []};
function setWindow(from, until) {
  const least = shared.whole * 1e-6, span = Math.min(Math.max(until - from, least), shared.whole * 1.0);
  from = Math.min(Math.max(from, 0), shared.whole - span);
  shared.from = from; shared.until = from + span;
  shared.views.forEach(view => view.later());
}

class View {  // a canvas of lanes below a time axis, in a box that scrolls; only what is seen is drawn
  constructor(box, lanes, painter) {
    Object.assign(this, {box, lanes, painter, waits: false});
    this.canvas = box.querySelector("canvas"); this.spacer = box.querySelector(".spacer");
    this.context = this.canvas.getContext("2d");
    shared.views.push(this);
    box.addEventListener("scroll", () => this.later());
    new ResizeObserver(() => this.later()).observe(box);
    this.canvas.addEventListener("pointermove", event => this.move(event));
    this.canvas.addEventListener("pointerleave", () => { hideTip(); this.drag = null; });
    this.canvas.addEventListener("pointerdown", event => {
      const spot = this.spot(event);
      this.drag = {x: event.clientX, from: shared.from, until: shared.until};
      if (spot && painter.pick) painter.pick(this, spot);
    });
    addEventListener("pointerup", () => { this.drag = null; });
    this.canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.shiftKey) {
        const moved = (event.deltaY || event.deltaX) / this.plot() * (shared.until - shared.from);
        setWindow(shared.from + moved, shared.until + moved);
      } else this.zoom(Math.exp(event.deltaY / 300), this.time(event.offsetX));
    }, {passive: false});
    box.addEventListener("keydown", event => this.key(event));
  }
  shown() { return this.lanes.filter(lane => !lane.hidden); }
  plot() { return Math.max(1, this.width - GUTTER - 8); }
  x(time) { return GUTTER + (time - shared.from) / (shared.until - shared.from) * this.plot(); }
  time(x) { return shared.from + (x - GUTTER) / this.plot() * (shared.until - shared.from); }
  zoom(factor, at) {  // around an instant; where that is not seen, around the middle
    if (at == null || at < shared.from || at > shared.until) at = (shared.from + shared.until) / 2;
    setWindow(at - (at - shared.from) * factor, at + (shared.until - at) * factor);
  }
  later() { if (!this.waits) { this.waits = true; requestAnimationFrame(() => { this.waits = false; this.draw(); }); } }
  layOut() {
    let y = AXIS;
    for (const lane of this.shown()) { lane.y = y; y += lane.height; }
    const total = y + 6, room = Math.min(total, Math.max(160, innerHeight * 0.68 - 2));
    this.spacer.style.height = Math.max(0, total - room) + "px";
    this.width = this.box.clientWidth; this.height = room;
    const scale = devicePixelRatio || 1;
    const [w, h] = [Math.round(this.width * scale), Math.round(room * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w; this.canvas.height = h;
      this.canvas.style.width = this.width + "px"; this.canvas.style.height = room + "px";
    }
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
  }
  draw() {
    this.layOut();
    const c = this.context, top = this.box.scrollTop;
    c.fillStyle = hue.ground; c.fillRect(0, 0, this.width, this.height);
    c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle";
    c.save(); c.translate(0, -top);
    for (const lane of this.shown()) {
      if (lane.y + lane.height < top + AXIS || lane.y > top + this.height) continue;
      c.fillStyle = hue.dim; c.textAlign = "right";
      c.fillText(lane.label, GUTTER - 8, lane.y + lane.height / 2 - (lane.note ? 9 : 0));
      if (lane.note) c.fillText(lane.note, GUTTER - 8, lane.y + lane.height / 2 + 9);
      c.save(); c.beginPath(); c.rect(GUTTER, lane.y, this.plot(), lane.height); c.clip();
      this.painter.paint(c, this, lane); c.restore();
    }
    c.restore();
    c.fillStyle = hue.ground; c.fillRect(0, 0, this.width, AXIS);
    this.axis(c);
  }
  axis(c) {
    const span = shared.until - shared.from, rough = span / Math.max(2, this.plot() / 120);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
    c.textAlign = "center"; c.strokeStyle = hue.dim; c.fillStyle = hue.dim; c.lineWidth = 1;
    for (let tick = Math.ceil(shared.from / step) * step; tick <= shared.until; tick += step) {
      const x = this.x(tick);
      c.fillText(seconds(Math.abs(tick) < step / 2 ? 0 : Number(tick.toPrecision(10))), Math.min(x, this.width - 28), 11);
      c.beginPath(); c.moveTo(x, AXIS - 5); c.lineTo(x, AXIS); c.stroke();
    }
    if (data.phases) for (const edge of data.phases) {
      const x = this.x(edge);
      if (x < GUTTER) continue;
      c.strokeStyle = hue.dim; c.setLineDash([4, 3]);
      c.beginPath(); c.moveTo(x, AXIS); c.lineTo(x, this.height); c.stroke(); c.setLineDash([]);
    }
  }
  spot(event) {
    const y = event.offsetY + this.box.scrollTop, x = event.offsetX;
    if (event.offsetY < AXIS || x < GUTTER) return null;
    const lane = this.shown().find(each => y >= each.y && y < each.y + each.height);
    return lane ? {lane, time: this.time(x), part: (y - lane.y) / lane.height} : null;
  }
  move(event) {
    if (this.drag && Math.abs(event.clientX - this.drag.x) > 3) {
      const moved = (this.drag.x - event.clientX) / this.plot() * (this.drag.until - this.drag.from);
      setWindow(this.drag.from + moved, this.drag.until + moved);
      return;
    }
    const spot = this.spot(event), text = spot && this.painter.tell(this, spot);
    text ? showTip(text, event.clientX, event.clientY) : hideTip();
  }
  key(event) {
    const span = shared.until - shared.from, at = this.painter.middle && this.painter.middle();
    hideTip();
    if (event.key === "+" || event.key === "=") this.zoom(0.6, at);
    else if (event.key === "-") this.zoom(1 / 0.6, at);
    else if (event.key === "0") setWindow(0, shared.whole);
    else if (this.painter.key && this.painter.key(this, event.key)) { /* done there */ }
    else if (event.key === "ArrowLeft") setWindow(shared.from - span / 8, shared.until - span / 8);
    else if (event.key === "ArrowRight") setWindow(shared.from + span / 8, shared.until + span / 8);
    else return;
    event.preventDefault();
  }
}
const tip = by("tip");
function showTip(text, x, y) {
  tip.textContent = text; tip.style.display = "block";
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(8, Math.min(y + 16, innerHeight - tip.offsetHeight - 8)) + "px";
}
function hideTip() { tip.style.display = "none"; }

// The timeline

const runs = {planned: unpack(data.run), measured: null};
let chosen = null;  // {lane, run, index}
function words(lane, run, index) {
  const rows = runs[run][lane.index], name = data.names[rows.name[index]], stage = Number(name.replace(/^\D+/, ""));
  const what = name[0] === "S" ? (name[1] === "F" ? "activation" : "gradient") + " between stages " + stage + " and " + (stage + 1)
    : KINDS[name[0]] + " of stage " + stage + " (" + data.stages[stage].words + ")";
  const at = "from " + seconds(rows.start[index]) + " to " + seconds(rows.end[index]) + ", " +
    seconds(rows.end[index] - rows.start[index]);
  return name + ", micro-batch " + rows.micro[index] + ", " + lane.label + "\n" + what + "\n" + run + ": " + at;
}
const timeline = {
  band(lane, run) {
    const both = runs.measured && runs.measured[lane.index], half = (lane.height - 4) / 2;
    if (!both) return run === "planned" ? [lane.y + 2, lane.height - 4] : null;
    return run === "planned" ? [lane.y + 2, half - 1] : [lane.y + 2 + half, half - 1];
  },
  paint(c, view, lane) {
    c.fillStyle = hue.idle; c.fillRect(GUTTER, lane.y + 2, view.plot(), lane.height - 4);
    for (const run of ["planned", "measured"]) {
      const rows = runs[run] && runs[run][lane.index], band = this.band(lane, run);
      if (!rows || !band) continue;
      const [y, height] = band, perSecond = view.plot() / (shared.until - shared.from);
      let last = -1;
      for (let i = firstVisible(rows, shared.from); i < rows.start.length && rows.start[i] <= shared.until; i++) {
        const x = view.x(rows.start[i]), width = (rows.end[i] - rows.start[i]) * perSecond;
        const name = data.names[rows.name[i]], isNarrow = width < 1;
        // Of operations within one pixel the first is drawn, as wide as the pixel: what is always busy looks so.
        if (isNarrow) { if (Math.floor(x) === last) continue; last = Math.floor(x); }
        c.fillStyle = hue[HUES[name[0]]];
        c.fillRect(isNarrow ? last : x, y, isNarrow ? 1 : width - (width > 3 ? 1 : 0), height);
        const label = name + "." + rows.micro[i], from = Math.max(x, GUTTER);
        if (height > 11 && x + width - from > label.length * 6.6 + 4) {
          c.fillStyle = wordsOn[HUES[name[0]]]; c.textAlign = "left"; c.fillText(label, from + 4, y + height / 2 + 0.5);
        }
        if (chosen && width > 2 && rows.micro[i] === runs[chosen.run][chosen.lane.index].micro[chosen.index]) {
          // Underlined, with the ground between: no colour is seen on all of the others.
          c.fillStyle = hue.ground; c.fillRect(x, y + height - 4, width, 4);
          c.fillStyle = hue.select; c.fillRect(x, y + height - 3, width, 3);
        }
      }
      if (!chosen || chosen.lane !== lane || chosen.run !== run) continue;
      const from = view.x(rows.start[chosen.index]), wide = Math.max(view.x(rows.end[chosen.index]) - from - 1, 3);
      for (const [colour, line] of [[hue.ground, 5], [hue.select, 3]]) {  // last: what follows in the row is below it
        c.strokeStyle = colour; c.lineWidth = line; c.strokeRect(from, y + 1, wide, height - 2);
      }
    }
  },
  at(view, {lane, time, part}) {
    const near = 2 / view.plot() * (shared.until - shared.from);
    for (const run of ["planned", "measured"]) {
      const rows = runs[run] && runs[run][lane.index], band = this.band(lane, run);
      if (!rows || !band) continue;
      const y = lane.y + part * lane.height;
      if (y < band[0] - 1 || y > band[0] + band[1] + 1) continue;
      const index = firstVisible(rows, time - near);
      if (index < rows.start.length && rows.start[index] <= time + near) return {lane, run, index};
    }
    return null;
  },
  tell(view, spot) { const found = this.at(view, spot); return found && words(found.lane, found.run, found.index); },
  pick(view, spot) { const found = this.at(view, spot); if (found) choose(view, found, false); },
  key(view, key) {
    if (key === "Escape") { chosen = null; by("told").textContent = HINT; view.later(); return true; }
    const steps = {ArrowLeft: -1, ArrowRight: 1};
    if (!(key in steps) && !["ArrowUp", "ArrowDown", "Home", "End"].includes(key)) return false;
    const shown = view.shown();
    if (!chosen) { choose(view, this.start(shown), true); return true; }
    let {lane, run, index} = chosen;
    const rows = runs[run][lane.index];
    if (key in steps) index += steps[key];
    else if (key === "Home") index = 0;
    else if (key === "End") index = rows.start.length - 1;
    else if (key === "ArrowDown" && run === "planned" && runs.measured && runs.measured[lane.index].start.length) {
      index = Math.min(firstVisible(runs.measured[lane.index], rows.start[index]), runs.measured[lane.index].start.length - 1);
      run = "measured";
    } else if (key === "ArrowUp" && run === "measured") {
      index = Math.min(firstVisible(runs.planned[lane.index], rows.start[index]), runs.planned[lane.index].start.length - 1);
      run = "planned";
    } else {
      const direction = key === "ArrowDown" ? 1 : -1, time = rows.start[index];
      let place = shown.indexOf(lane) + direction;
      while (shown[place] && !runs.planned[shown[place].index].start.length) place += direction;
      if (!shown[place]) return true;
      lane = shown[place];
      run = direction < 0 && runs.measured && runs.measured[lane.index].start.length ? "measured" : "planned";
      index = Math.min(firstVisible(runs[run][lane.index], time), runs[run][lane.index].start.length - 1);
    }
    if (index >= 0 && index < runs[run][lane.index].start.length) choose(view, {lane, run, index}, true);
    return true;
  },
  middle() {  // of what is chosen
    if (!chosen) return null;
    const rows = runs[chosen.run][chosen.lane.index];
    return (rows.start[chosen.index] + rows.end[chosen.index]) / 2;
  },
  start(shown) {
    const lane = shown.find(each => runs.planned[each.index].start.length);
    return {lane, run: "planned", index: Math.min(firstVisible(runs.planned[lane.index], shared.from),
      runs.planned[lane.index].start.length - 1)};
  },
};
function choose(view, found, follow) {
  chosen = found;
  const {lane, run, index} = found, rows = runs[run][lane.index];
  by("told").textContent = words(lane, run, index).replaceAll("\n", " · ");
  if (follow) {
    const span = shared.until - shared.from;
    if (rows.start[index] < shared.from || rows.end[index] > shared.until)
      setWindow(rows.start[index] - span / 3, rows.start[index] + span * 2 / 3);
    if (lane.y < view.box.scrollTop + AXIS) view.box.scrollTop = lane.y - AXIS;
    if (lane.y + lane.height > view.box.scrollTop + view.height) view.box.scrollTop = lane.y + lane.height - view.height;
  }
  view.later();
}

// A part of a stack that stands on y. Where there is room, a line of the ground is between it and the next: two parts
// may be as light as each other.
function stacked(c, colour, x, y, width, height) {
  const line = height > 3 ? 1 : 0;
  c.fillStyle = colour; c.fillRect(x, y - height + line, width, height - line);
  if (line) { c.fillStyle = hue.ground; c.fillRect(x, y - height, width, line); }
}

// Memory over time

const memory = {
  paint(c, view, lane) {
    const own = data.memory[lane.index], most = Math.max(lane.most, 1), scale = (lane.height - 6) / most;
    const bottom = lane.y + lane.height - 2;
    c.fillStyle = hue.idle; c.fillRect(GUTTER, lane.y + 4, view.plot(), lane.height - 6);
    const first = Math.max(0, this.before(own, shared.from)), scaled = devicePixelRatio || 1;
    const whole = x => Math.round(x * scaled) / scaled;  // to whole pixels: else seams are seen between two of them
    let done = -1;
    for (let i = first; i < own.time.length && own.time[i] <= shared.until; i++) {
      const x = Math.max(GUTTER, view.x(own.time[i]));
      let j = i + 1, level = own.level[i];
      // Of instants within one pixel the highest is drawn.
      while (j < own.time.length && view.x(own.time[j]) - x < 0.6) {
        if (own.totals[own.level[j]] > own.totals[level]) level = own.level[j];
        j++;
      }
      const end = whole(j < own.time.length ? view.x(own.time[j]) : view.x(shared.whole));
      let y = bottom;
      for (const [term, value] of own.levels[level].entries()) {
        const height = value * scale;
        stacked(c, hue[TERMS[term]], whole(x), y, Math.max(end - whole(x), 0.6), height); y -= height;
      }
      i = j - 1;
    }
    if (data.memory_bytes <= most * 1.0001) {
      const y = bottom - data.memory_bytes * scale;
      c.strokeStyle = hue.limit; c.lineWidth = 2; c.setLineDash([6, 3]);
      c.beginPath(); c.moveTo(GUTTER, y); c.lineTo(GUTTER + view.plot(), y); c.stroke(); c.setLineDash([]);
    }
  },
  before(own, time) {
    let low = 0, high = own.time.length;
    while (low < high) { const middle = (low + high) >> 1; own.time[middle] <= time ? low = middle + 1 : high = middle; }
    return low - 1;
  },
  tell(view, {lane, time}) {
    const own = data.memory[lane.index], place = this.before(own, time);
    if (place < 0 || time > shared.whole) return null;
    const level = own.levels[own.level[place]];
    const parts = TERMS.map((term, i) => level[i] ? term + " " + bytes(level[i]) : "").filter(Boolean).join(", ");
    return lane.label + ", " + seconds(time) + "\n" + bytes(own.totals[own.level[place]]) + " of " +
      bytes(data.memory_bytes) + "\n" + parts;
  },
};

// Layers

function drawLayers() {
  const canvas = by("layers");
  if (!canvas) return;
  const width = canvas.parentElement.clientWidth, height = 292, scale = devicePixelRatio || 1;
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const c = canvas.getContext("2d"); c.setTransform(scale, 0, 0, scale, 0, 0);
  c.fillStyle = hue.ground; c.fillRect(0, 0, width, height); c.font = "12px system-ui, sans-serif";
  const layers = data.layers, each = (width - GUTTER - 8) / layers.length, gap = each > 4 ? 1 : 0;
  const time = Math.max(...layers.map(l => l.forward + l.backward)) || 1;
  const size = Math.max(...layers.map(l => l.weights + l.stash)) || 1;
  const panels = [[20, 120, time, [["forward", "F"], ["backward", "B"]], seconds],
    [164, 120, size, [["weights", "weights"], ["stash", "stash"]], bytes]];
  for (const [top, tall, most, parts, format] of panels) {
    c.textAlign = "right"; c.textBaseline = "middle"; c.fillStyle = hue.dim;
    c.fillText(format(most), GUTTER - 8, top); c.fillText("0", GUTTER - 8, top + tall);
    layers.forEach((layer, i) => {
      let y = top + tall;
      for (const [field, colour] of parts) {
        const h = layer[field] / most * tall;
        stacked(c, hue[colour], GUTTER + i * each, y, each - gap, h); y -= h;
      }
    });
    c.strokeStyle = hue.edge; c.strokeRect(GUTTER, top, each * layers.length, tall);
  }
  // Where stages are narrow, lines across the bars would hide them: they stand between the two pictures alone.
  const isDense = (width - GUTTER - 8) / data.stages.length < 10, lines = isDense ? [[14, 20], [142, 162], [285, 290]] : [[14, 290]];
  let free = GUTTER;  // where the next label may begin
  data.stages.forEach((stage, i) => {
    const from = GUTTER + stage.layers[0] * each, until = GUTTER + stage.layers[1] * each;
    c.strokeStyle = hue.text; c.lineWidth = 1; c.setLineDash(isDense ? [] : [3, 3]);
    for (const [top, bottom] of lines) { c.beginPath(); c.moveTo(from, top); c.lineTo(from, bottom); c.stroke(); }
    c.setLineDash([]);
    c.fillStyle = hue.dim; c.textAlign = "center";
    const whole = "stage " + i + ", device " + stage.device, middle = (from + until) / 2;
    const text = c.measureText(whole).width + 4 < until - from ? whole : String(i), half = c.measureText(text).width / 2;
    if (middle - half < free) return;
    c.fillText(text, middle, 8); free = middle + half + 8;
  });
  if (layerChosen !== null) {
    c.strokeStyle = hue.select; c.lineWidth = 2; c.strokeRect(GUTTER + layerChosen * each, 16, Math.max(each - 1, 2), 272);
  }
}
let layerChosen = null;
function layerWords(i) {
  const l = data.layers[i], stage = data.stages.findIndex(s => s.layers[0] <= i && i < s.layers[1]);
  return "layer " + i + ": " + l.name + (l.type && !l.name.includes(l.type) ? ", " + l.type : "") + ", stage " + stage +
    "\nforward " + seconds(l.forward) + ", backward " + seconds(l.backward) + "\nweights " + bytes(l.weights) + ", stash " +
    bytes(l.stash) + ", output " + bytes(l.output);
}
function watchLayers() {
  const canvas = by("layers");
  if (!canvas) return;
  const at = event => {
    const i = Math.floor((event.offsetX - GUTTER) / ((canvas.clientWidth - GUTTER - 8) / data.layers.length));
    return i >= 0 && i < data.layers.length ? i : null;
  };
  canvas.addEventListener("pointermove", event => {
    const i = at(event);
    i === null ? hideTip() : showTip(layerWords(i), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", hideTip);
  by("layer-told").textContent = LAYER_HINT;
  const chooseLayer = i => {
    layerChosen = Math.min(Math.max(i, 0), data.layers.length - 1);
    by("layer-told").textContent = layerWords(layerChosen).replaceAll("\n", " · ");
    drawLayers();
  };
  canvas.addEventListener("pointerdown", event => { const i = at(event); if (i !== null) chooseLayer(i); });
  canvas.addEventListener("keydown", event => {
    const steps = {ArrowLeft: -1, ArrowRight: 1};
    if (!(event.key in steps)) return;
    event.preventDefault();
    chooseLayer(layerChosen === null ? 0 : layerChosen + steps[event.key]);
  });
  new ResizeObserver(() => requestAnimationFrame(drawLayers)).observe(canvas.parentElement);
}

// The table of operations has pages: tens of thousands of rows would stop any browser.

const PAGE = 200;
function operationTable() {
  const place = by("operations"), rows = [];
  for (const run of ["planned", "measured"]) if (runs[run])
    runs[run].forEach((lane, number) => lane.start.forEach((_, i) => rows.push([run, number, i])));
  rows.sort((a, b) => runs[a[0]][a[1]].start[a[2]] - runs[b[0]][b[1]].start[b[2]]);
  let page = 0;
  const body = document.createElement("tbody"), line = document.createElement("p");
  const show = () => {
    body.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map(([run, number, i]) => {
      const lane = runs[run][number], row = document.createElement("tr");
      for (const text of [run, data.names[lane.name[i]], lane.micro[i], data.lanes[number], seconds(lane.start[i]),
        seconds(lane.end[i] - lane.start[i])]) row.insertCell().textContent = text;
      return row;
    }));
    line.textContent = "rows " + (page * PAGE + 1) + " to " + Math.min(rows.length, (page + 1) * PAGE) + " of " + rows.length;
  };
  const button = (text, step) => {
    const made = document.createElement("button"); made.textContent = text;
    made.onclick = () => { page = Math.min(Math.max(page + step, 0), Math.ceil(rows.length / PAGE) - 1); show(); };
    return made;
  };
  const table = document.createElement("table");
  table.innerHTML = "<thead><tr><th>run<th>operation<th>micro-batch<th>where<th>start<th>duration</tr></thead>";
  table.append(body); show();
  const box = document.createElement("div"); box.className = "scroll"; box.append(table);
  place.replaceChildren(button("earlier", -1), " ", button("later", 1), line, box);
}

// Begin

function begin() {
  readColours();
  by("told").textContent = HINT;
  const measured = data.measured || [];
  shared.whole = Math.max(data.run.seconds, ...measured.map(each => each.seconds)) || 1;
  shared.until = shared.whole;
  const tall = measured.length ? 38 : 22;
  const lanes = data.lanes.map((label, index) => ({label, index, height: tall, hidden: false}));
  const box = by("timeline");
  const view = new View(box, lanes, timeline);
  const step = by("step");
  const chooseStep = () => {
    runs.measured = measured.length ? unpack(measured[Number(step ? step.value : 0)]) : null; chosen = null; view.later();
  };
  if (step) step.onchange = chooseStep;
  chooseStep();
  by("links").onchange = event => {
    for (const lane of lanes) if (lane.label.startsWith("link")) lane.hidden = !event.target.checked;
    view.later();
  };
  by("closer").onclick = () => view.zoom(0.6, timeline.middle());
  by("farther").onclick = () => view.zoom(1 / 0.6, timeline.middle());
  by("all").onclick = () => setWindow(0, shared.whole);
  by("operations-of").addEventListener("toggle", operationTable, {once: true});
  if (data.memory) {
    const most = Math.max(...data.memory.map(own => {
      own.time = sums(own.t).map(each => each * data.unit); own.level = own.l;
      own.totals = own.levels.map(level => level.reduce((a, b) => a + b, 0));
      return Math.max(0, ...own.totals);
    }));
    const limit = data.memory_bytes <= 3 * most ? Math.max(most, data.memory_bytes) : most;
    const lanesOf = data.memory.map((own, index) =>
      ({label: "device " + index, note: data.peaks[index], index, height: 72, most: limit}));
    new View(by("memory"), lanesOf, memory);
  }
  watchLayers();
  const redraw = () => { readColours(); shared.views.forEach(each => each.later()); drawLayers(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  by("theme").onclick = () => {
    const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    redraw();
  };
  window.madpipe = {data, runs, shared, view, hue, wordsOn, chosen: () => chosen};
}
begin();
