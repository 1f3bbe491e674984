// Draws a run while it runs. Python puts uPlot's build, which defines the global name
// `uPlot`, in front of this module.
/* global uPlot */

const HEIGHT = 230;
// Where there are more points than this, the next keyframe, which is thinned, is taken.
const MAX_POINTS = 500_000;
const LOSS = "loss";
const MEMORY = "(memory)";
const MAX_PANELS = 8;
const LINE_WIDTH = 1.5;

// ---- what the kernel sends ----

/** The series of all ranks, brought up to date by keyframes and deltas. */
class History {
  constructor() {
    this.sequence = null;
    this.panels = new Map(); // name -> Map(rank -> {steps, values})
    this.numPoints = 0;
    this.mostMemory = 0; // of any rank, in MiB
  }

  /** Take the state that a keyframe holds, where what is here is older or too long. */
  takeKeyframe(frame, buffer) {
    if (frame.sequence === this.sequence && this.numPoints <= MAX_POINTS) return;
    this.panels = new Map([LOSS, MEMORY].map((name) => [name, new Map()]));
    this.numPoints = 0;
    this._append(frame, buffer);
  }

  /** Append a delta; false where the one before it is missing. */
  takeDelta(frame, buffer) {
    if (this.sequence === null || frame.sequence > this.sequence + 1) return false;
    // What a keyframe had already is no news.
    if (frame.sequence === this.sequence + 1) this._append(frame, buffer);
    return true;
  }

  _append(frame, buffer) {
    // A copy, because an array of float64 must begin at a multiple of 8 bytes.
    const bytes = buffer.buffer.slice(
      buffer.byteOffset,
      buffer.byteOffset + buffer.byteLength,
    );
    const numbers = new Float64Array(bytes);
    let at = 0;
    for (const [rank, name, count] of frame.series) {
      const { steps, values } = this._series(name, rank);
      for (let i = 0; i < count; i++) {
        steps.push(numbers[at + i]);
        values.push(numbers[at + count + i]);
        if (name === MEMORY)
          this.mostMemory = Math.max(this.mostMemory, numbers[at + count + i]);
      }
      at += 2 * count;
      this.numPoints += count;
    }
    this.sequence = frame.sequence;
  }

  _series(name, rank) {
    if (!this.panels.has(name)) this.panels.set(name, new Map());
    const ranks = this.panels.get(name);
    if (!ranks.has(rank)) ranks.set(rank, { steps: [], values: [] });
    return ranks.get(rank);
  }

  lastStep() {
    let last = 0;
    for (const ranks of this.panels.values())
      for (const { steps } of ranks.values())
        last = Math.max(last, steps[steps.length - 1] ?? 0);
    return last;
  }
}

/** The series as uPlot takes them: all steps, and then the values of each rank. */
export function align(allSeries) {
  const sorted = allSeries.map(inOrder);
  const places = sorted.map(() => 0);
  const steps = [];
  const columns = sorted.map(() => []);
  for (;;) {
    let next = Infinity;
    sorted.forEach((series, i) => {
      if (places[i] < series.steps.length)
        next = Math.min(next, series.steps[places[i]]);
    });
    if (next === Infinity) return [steps, ...columns];
    steps.push(next);
    sorted.forEach((series, i) => {
      // To uPlot `undefined` is a step that a rank did not log, `null` a hole.
      let value;
      if (series.steps[places[i]] === next) {
        value = series.values[places[i]++];
        if (!Number.isFinite(value)) value = null;
      }
      columns[i].push(value);
    });
  }
}

/** A series by its steps, which `log(step=...)` may have given in any order. */
function inOrder(series) {
  const { steps, values } = series;
  if (steps.every((step, i) => i === 0 || steps[i - 1] <= step)) return series;
  const order = steps.map((_, i) => i).sort((a, b) => steps[a] - steps[b]);
  return { steps: order.map((i) => steps[i]), values: order.map((i) => values[i]) };
}

/** The place in `steps` that is nearest to `step`. */
function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

// ---- what is drawn ----

const element = (tag, className, text = "") =>
  Object.assign(document.createElement(tag), { className, textContent: text });

/** What to multiply MiB by, and the unit of that: numbers up to this one are read well.
 * As `memory_unit` of labkit.records, so that the picture at the end has the same. */
function memoryUnit(mib) {
  if (mib >= 2048) return [1 / 1024, "GiB"];
  return mib >= 2 ? [1, "MiB"] : [1024, "KiB"];
}

const format = (value) =>
  value === undefined
    ? ""
    : Number.isFinite(value)
      ? String(Number(value.toPrecision(4)))
      : String(value);

/** One chart of one metric: a curve for each rank. */
class Panel {
  constructor(view, name) {
    this.view = view;
    this.name = name;
    this.isLog = name === LOSS && view.logScale;
    this.zoom = null; // the heights in sight, where the mouse has chosen them
    this.el = element("div", "labkit-panel");
    const head = this.el.appendChild(element("div", "labkit-panel-head"));
    this.label = head.appendChild(element("span", "", name));
    this.button = head.appendChild(element("button", "labkit-log", "log scale"));
    this.button.setAttribute("aria-pressed", String(this.isLog));
    this.button.onclick = () => this._switchScale();
    this.place = this.el.appendChild(element("div", "labkit-chart"));
    this.chart = null;
  }

  /** Bring the chart up to the history, at the width that it has. */
  draw() {
    const label = this.view.label(this.name);
    if (this.label.textContent !== label) {
      this.label.textContent = label;
      this.zoom = null; // it was in another unit
    }
    const width = Math.floor(this.place.clientWidth);
    if (!width) return; // not on the page, or hidden
    const data = this._data();
    if (this.chart === null) {
      this.chart = new uPlot(this._options(width), data, this.place);
      return;
    }
    if (this.chart.width !== width) this.chart.setSize({ width, height: HEIGHT });
    this.chart.setData(data);
  }

  showRank(index, isShown) {
    this.chart?.setSeries(index + 1, { show: isShown });
  }

  destroy() {
    this.chart?.destroy();
    this.chart = null;
  }

  _data() {
    const ranks = this.view.history.panels.get(this.name) ?? new Map();
    const none = { steps: [], values: [] };
    let data = align(this.view.ranks.map((rank) => ranks.get(rank) ?? none));
    const scale = this.view.scale(this.name);
    if (scale !== 1) {
      const scaled = (value) => (Number.isFinite(value) ? value * scale : value);
      data = [data[0], ...data.slice(1).map((column) => column.map(scaled))];
    }
    if (!this.isLog) return data;
    const positive = (value) => (value <= 0 ? null : value);
    return [data[0], ...data.slice(1).map((column) => column.map(positive))];
  }

  /** Show what the mouse has framed: steps in all panels, heights in this one. */
  _zoomTo(chart, { left, top, width, height }) {
    if (width < 3 || height < 3) return;
    const isAllOf = (length, side) => length >= chart.over[side] - 1;
    if (!isAllOf(height, "clientHeight"))
      this.zoom = [top + height, top].map((y) => chart.posToVal(y, "y"));
    if (!isAllOf(width, "clientWidth"))
      this.view.zoom = [left, left + width].map((x) => chart.posToVal(x, "x"));
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.view.schedule();
  }

  /** The heights that show all data between `low` and `high`. */
  _heights(chart, low, high) {
    // Charts without data have no limits.
    if (low === null || low === undefined) return this.isLog ? [0.1, 10] : [0, 1];
    if (this.isLog) return uPlot.rangeLog(low, high, 10, false);
    // From 0 where that does not flatten the curve; memory always, so that a change
    // looks as large as it is.
    const isFrom0 = low >= 0 && (low < 0.7 * high || this.name === MEMORY);
    const lowest = isFrom0 ? 0 : low;
    const margin = 0.05 * (high - lowest) || 0.05 * Math.abs(high) || 0.5;
    return [isFrom0 ? 0 : low - margin, high + margin];
  }

  _switchScale() {
    this.isLog = !this.isLog;
    this.zoom = null;
    this.button.setAttribute("aria-pressed", String(this.isLog));
    this.destroy(); // the kind of a scale is for a chart's whole life
    this.draw();
  }

  _options(width) {
    const { view } = this;
    const axis = {
      stroke: () => view.theme("--jp-ui-font-color1", "#212121"),
      grid: { stroke: () => view.theme("--jp-border-color2", "#e0e0e0"), width: 1 },
      ticks: { stroke: () => view.theme("--jp-border-color2", "#e0e0e0"), width: 1 },
      font: "11px system-ui, sans-serif",
    };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      scales: {
        x: { time: false, range: () => view.range() },
        y: {
          distr: this.isLog ? 3 : 1,
          range: (chart, low, high) => this.zoom ?? this._heights(chart, low, high),
        },
      },
      axes: [
        {
          ...axis,
          size: 30,
          incrs: wholeSteps,
          label: "optimizer step",
          labelSize: 16,
          labelFont: axis.font,
        },
        { ...axis, size: 62, values: (_, ticks) => ticks.map(tickLabel) },
      ],
      series: [
        {},
        ...view.ranks.map((rank, i) => ({
          label: `rank ${rank}`,
          stroke: () => view.colour(i),
          width: LINE_WIDTH,
          dash: view.dash(i),
          show: view.isShown[i],
          points: { show: false },
        })),
      ],
      cursor: {
        sync: {
          key: view.syncKey,
          scales: ["x", null],
          filters: { pub: (type) => type === "mousemove" },
        },
        y: false,
        // The view zooms, because all of its panels show the same steps.
        drag: { x: true, y: true, uni: 30, setScale: false },
        bind: { dblclick: () => () => view.showAll() },
      },
      hooks: {
        setCursor: [
          ({ cursor, posToVal }) =>
            view.point(cursor.left < 0 ? null : posToVal(cursor.left, "x")),
        ],
        setSelect: [(chart) => this._zoomTo(chart, chart.select)],
      },
    };
  }
}

const wholeSteps = Array.from({ length: 12 }, (_, power) => 10 ** power).flatMap(
  (unit) => [unit, 2 * unit, 5 * unit],
);

const tickLabel = (value) =>
  value === null ? "" : String(Number(value.toPrecision(6)));

/** All panels of a run, and one legend for them. */
class RunView {
  constructor(el, ranks, styles, logScale) {
    this.ranks = ranks;
    this.styles = styles;
    this.logScale = logScale;
    this.history = new History();
    this.isShown = ranks.map(() => true);
    this.zoom = null; // the steps in sight, where the mouse has chosen them
    this.pointed = null;
    this.numSteps = null;
    this.syncKey = uPlot.sync(`labkit-${crypto.getRandomValues(new Uint32Array(2))}`).key;
    this.panels = new Map();
    this.root = el.appendChild(element("div", "labkit-run"));
    this.title = this.root.appendChild(element("div", "labkit-title"));
    this.remarks = this.root.appendChild(element("div", "labkit-remarks"));
    const body = this.root.appendChild(element("div", "labkit-body"));
    this.grid = body.appendChild(element("div", "labkit-panels"));
    this.legend = new Legend(this);
    body.append(this.legend.el);
    this.more = this.root.appendChild(element("div", "labkit-more"));
    this.resizes = new ResizeObserver(() => this.schedule());
    this.resizes.observe(this.root);
  }

  /** What a frame says besides its series. */
  describe({ title, remarks, num_steps }) {
    this.title.textContent = title;
    this.remarks.textContent = remarks;
    this.numSteps = num_steps;
    this.schedule();
  }

  /** Draw once before the browser's next frame, however often this is called. */
  schedule() {
    this.request ??= requestAnimationFrame(() => {
      this.request = undefined;
      this.draw();
    });
  }

  draw() {
    const names = [...this.history.panels.keys()];
    const numMore = names.length - MAX_PANELS;
    this.more.textContent =
      numMore > 0 ? `${numMore} more metrics are in run.history` : "";
    for (const name of names) {
      if (this.panels.has(name) || this.panels.size === MAX_PANELS) continue;
      const panel = new Panel(this, name);
      this.panels.set(name, panel);
      this.grid.append(panel.el);
    }
    for (const panel of this.panels.values()) panel.draw();
    this.legend.draw();
  }

  /** The steps that are in sight: those zoomed to, or the whole run. */
  range() {
    return this.zoom ?? [0, Math.max(this.numSteps ?? 0, this.history.lastStep(), 1)];
  }

  /** Undo all zooming. */
  showAll() {
    this.zoom = null;
    for (const panel of this.panels.values()) panel.zoom = null;
    this.schedule();
  }

  /** The mouse is at a step, or (null) nowhere. */
  point(step) {
    if (step === this.pointed) return;
    this.pointed = step;
    this.legend.schedule();
  }

  toggle(index) {
    this.isShown[index] = !this.isShown[index];
    for (const panel of this.panels.values())
      panel.showRank(index, this.isShown[index]);
    this.legend.draw();
  }

  /** What a panel is named, with its unit. */
  label(name) {
    if (name !== MEMORY) return name;
    return `memory of tensors (${memoryUnit(this.history.mostMemory)[1]})`;
  }

  /** What its values are multiplied by to be in that unit. */
  scale(name) {
    return name === MEMORY ? memoryUnit(this.history.mostMemory)[0] : 1;
  }

  theme(name, fallback) {
    return getComputedStyle(this.root).getPropertyValue(name).trim() || fallback;
  }

  /** The colour of a rank; a lighter one on a dark page. */
  colour(index) {
    const ink = getComputedStyle(this.root).color.match(/[\d.]+/g).map(Number);
    const isDark = ink[0] + ink[1] + ink[2] > 384;
    const { color } = this.styles[index];
    return isDark ? `color-mix(in srgb, ${color} 70%, white)` : color;
  }

  /** The dashes of a rank, as matplotlib has them: in widths of the line. */
  dash(index) {
    const { ls } = this.styles[index];
    const unit = LINE_WIDTH * devicePixelRatio;
    return ls === "-" ? [] : ls[1].map((length) => length * unit);
  }

  destroy() {
    this.resizes.disconnect();
    cancelAnimationFrame(this.request);
    cancelAnimationFrame(this.legend.request);
    for (const panel of this.panels.values()) panel.destroy();
    this.root.remove();
  }
}

/** A row a rank: a button that switches it, and its value in each panel. */
class Legend {
  constructor(view) {
    this.view = view;
    this.el = element("div", "labkit-legend");
    const table = this.el.appendChild(element("table", ""));
    this.head = table.createTHead().insertRow();
    this.step = this.head.appendChild(element("th", "labkit-step"));
    const body = table.createTBody();
    this.rows = view.ranks.map((rank, i) => {
      const row = body.insertRow();
      const button = element("button", "labkit-rank");
      button.title = "show or hide this rank";
      button.onclick = () => view.toggle(i);
      const swatch = button.appendChild(element("span", "labkit-swatch"));
      button.append(`rank ${rank}`);
      row.insertCell().append(button);
      return { row, button, swatch };
    });
  }

  schedule() {
    this.request ??= requestAnimationFrame(() => {
      this.request = undefined;
      this.draw();
    });
  }

  draw() {
    const { history, pointed, ranks, isShown } = this.view;
    const names = [...this.view.panels.keys()];
    while (this.head.cells.length <= names.length) {
      const name = names[this.head.cells.length - 1];
      this.head.append(element("th", "", name));
      for (const { row } of this.rows) row.insertCell();
    }
    names.forEach((name, column) => {
      this.head.cells[column + 1].textContent = this.view.label(name);
    });
    let shownStep = null;
    this.rows.forEach(({ row, button, swatch }, i) => {
      button.setAttribute("aria-pressed", String(isShown[i]));
      swatch.style.borderColor = this.view.colour(i);
      swatch.style.borderTopStyle = this.view.dash(i).length ? "dashed" : "solid";
      names.forEach((name, column) => {
        const series = history.panels.get(name).get(ranks[i]);
        const place = series && this._place(series.steps, pointed);
        const value = series?.values[place];
        row.cells[column + 1].textContent = format(
          value === undefined ? value : value * this.view.scale(name),
        );
        shownStep ??= series?.steps[place] ?? null;
      });
    });
    this.step.textContent =
      pointed === null || shownStep === null ? "last" : `step ${shownStep}`;
  }

  _place(steps, pointed) {
    return pointed === null ? steps.length - 1 : nearest(steps, pointed);
  }
}

// ---- the widget ----

function render({ model, el }) {
  const view = new RunView(
    el,
    model.get("ranks"),
    model.get("styles"),
    model.get("log_scale"),
  );
  let hasAsked = false;

  const takeKeyframe = () => {
    const frame = model.get("keyframe");
    if (!frame.series) return; // the run is over
    view.history.takeKeyframe(frame, frame.values);
    view.describe(frame);
    hasAsked = false;
  };
  const takeDelta = (frame, [buffer]) => {
    if (view.history.takeDelta(frame, buffer)) return view.describe(frame);
    // A busy kernel may not hear it; a keyframe comes every few seconds as well.
    if (!hasAsked) model.send({ missed: frame.sequence });
    hasAsked = true;
  };

  model.on("change:keyframe", takeKeyframe);
  model.on("msg:custom", takeDelta);
  takeKeyframe();
  return () => {
    model.off("change:keyframe", takeKeyframe);
    model.off("msg:custom", takeDelta);
    view.destroy();
  };
}

export default { render };
