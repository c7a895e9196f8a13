// What all charts share: the data, colours, axes, tool tip, and which trial is selected.
// Text from the user reaches the page only through textContent and fillText.

const D = JSON.parse(document.getElementById('data').textContent);
const T = D.trials;
const N = T.id.length;
const byId = (id) => document.getElementById(id);
const OKABE_ITO = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#7f7f7f', '#b3a200'];
const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
  [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];

let printing = false;
let selected = null;
let brushed = () => true; // set by the parallel coordinates
const charts = [];
const onFilter = [];

function isDark() {
  if (printing) return false;
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
// A colour from best (0) to worst (1): the best stands out from the page, dark on light and light on dark.
function shade(part, alpha = 1) {
  const t = Math.min(1, Math.max(0, part));
  const place = (isDark() ? 1 - 0.82 * t : 0.92 * t) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(place));
  const mixed = CIVIDIS[low].map((c, k) => Math.round(c + (CIVIDIS[low + 1][k] - c) * (place - low)));
  return `rgba(${mixed.join(',')},${alpha})`;
}
function badness(value) {
  const [low, high] = D.value_limits;
  const part = (value - low) / (high - low || 1);
  return D.mode === 'max' ? 1 - part : part;
}
function tint(trial, alpha = 1) {
  if (N <= OKABE_ITO.length) return OKABE_ITO[trial];
  const value = D.value[trial];
  return value === null ? (isDark() ? `rgba(120,128,140,${alpha})` : `rgba(150,156,166,${alpha})`) : shade(badness(value), alpha);
}

function short(value) {
  if (value === null || value === undefined) return '';
  if (typeof value !== 'number') return String(value);
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, 'e');
  return String(Number(value.toPrecision(4)));
}
function valueOf(param, trial) {
  const value = param.values[trial];
  if (value === null) return '';
  return param.kind === 'category' ? param.categories[value] : short(value);
}
function position(param, trial) {
  const value = param.values[trial];
  if (value === null) return null;
  if (param.kind === 'category') return value;
  return param.log ? (value > 0 ? Math.log10(value) : null) : value;
}
// The same small shift for the same trial each time, so that categories' points do not hide each other.
function jitter(trial, salt = 1) {
  const wave = Math.sin((trial + 1) * 12.9898 * salt) * 43758.5453;
  return wave - Math.floor(wave) - 0.5;
}
function describe(trial) {
  const lines = [T.id[trial] + (trial === D.best ? ' (best)' : '') + ', ' + T.status[trial].toLowerCase()];
  if (D.metric) lines.push(`${D.metric} ${short(T.last[trial]) || 'none'}, best ${short(T.best[trial]) || 'none'}`);
  if (D.said) lines.push(...D.said[trial]);
  lines.push(`${T.iterations[trial]} iterations${T.duration_text[trial] ? ', ' + T.duration_text[trial] : ''}`);
  for (const param of D.params.slice(0, 8)) if (param.values[trial] !== null) lines.push(`${param.name} = ${valueOf(param, trial)}`);
  if (T.error[trial]) lines.push(T.error[trial]);
  return lines;
}

// ---- Axes -------------------------------------------------------------------------------------------
function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const marks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) marks.push(Number((k * step).toPrecision(12)));
  return marks.map((at) => ({ at, text: short(at) }));
}
function logTicks(low, high, count = 5) {
  const every = Math.max(1, Math.round((high - low) / count));
  let marks = [];
  for (let d = Math.ceil(low - 1e-9); d <= high + 1e-9; d += 1) if (d % every === 0) marks.push({ at: d, text: short(10 ** d) });
  if (marks.length < 2) {
    marks = [];
    for (let d = Math.floor(low); d <= Math.ceil(high); d += 1) {
      for (const m of [1, 2, 5]) {
        const at = d + Math.log10(m);
        if (at >= low && at <= high) marks.push({ at, text: short(m * 10 ** d) });
      }
    }
  }
  return marks;
}
function paramAxis(param) {
  const [low, high] = param.limits;
  if (param.kind === 'category') {
    const every = Math.max(1, Math.ceil(param.categories.length / 12));
    const ticks = param.categories.map((text, at) => ({ at, text: text.length > 12 ? text.slice(0, 11) + '…' : text }));
    return { low, high, ticks: ticks.filter((_, k) => k % every === 0), label: param.name };
  }
  const pad = 0.03 * (high - low);
  return { low: low - pad, high: high + pad, label: param.name, log: param.log };
}
function timeAxis(seconds) {
  const units = [['days', 86400], ['hours', 3600], ['minutes', 60], ['seconds', 1]];
  return units.find(([, length]) => seconds >= 2 * length) || units[3];
}
// Draws the frame of a chart and returns its scales.
function frame(g, width, height, x, y, extra = {}) {
  g.font = '12px system-ui, sans-serif';
  const yTicks = y.ticks || (y.log ? logTicks(y.low, y.high) : niceTicks(y.low, y.high, Math.max(3, height / 55)));
  const widest = Math.max(...yTicks.map((t) => g.measureText(t.text).width), 8);
  const left = Math.min(extra.maxLeft || 110, widest + 12);
  const box = { left, top: extra.top || 18, right: width - 10, bottom: height - (x.label ? 40 : 24) };
  const sx = (v) => box.left + ((v - x.low) / (x.high - x.low || 1)) * (box.right - box.left);
  const sy = (v) => box.bottom - ((v - y.low) / (y.high - y.low || 1)) * (box.bottom - box.top);
  const xTicks = x.ticks || (x.log ? logTicks(x.low, x.high, (box.right - box.left) / 70) : niceTicks(x.low, x.high, Math.max(2, (box.right - box.left) / 80)));
  const ink = css('--soft');
  g.strokeStyle = css('--grid');
  g.fillStyle = ink;
  g.lineWidth = 1;
  g.textBaseline = 'middle';
  g.textAlign = 'right';
  for (const tick of yTicks) {
    const at = Math.round(sy(tick.at)) + 0.5;
    if (at < box.top - 1 || at > box.bottom + 1) continue;
    line(g, box.left, at, box.right, at);
    g.fillText(tick.text, box.left - 7, at, left - 9);
  }
  g.textBaseline = 'top';
  g.textAlign = 'center';
  const room = (box.right - box.left) / Math.max(1, xTicks.length);
  for (const tick of xTicks) {
    const at = Math.round(sx(tick.at)) + 0.5;
    if (at < box.left - 1 || at > box.right + 1) continue;
    if (!x.ticks) line(g, at, box.top, at, box.bottom);
    const lines = String(tick.text).split('\n');
    lines.forEach((text, k) => g.fillText(text, Math.min(at, width - g.measureText(text).width / 2 - 1), box.bottom + 6 + 14 * k, x.ticks ? room - 4 : undefined));
  }
  if (x.label) { g.textAlign = 'right'; g.fillText(x.label, box.right, height - 14, box.right - box.left); }
  if (y.label) { g.textAlign = 'left'; g.textBaseline = 'alphabetic'; g.fillText(y.label, 0, 11, width); }
  return { sx, sy, box };
}
function line(g, x0, y0, x1, y1) {
  g.beginPath(); g.moveTo(x0, y0); g.lineTo(x1, y1); g.stroke();
}
function clipTo(g, box, draw) {
  g.save(); g.beginPath(); g.rect(box.left - 6, box.top - 6, box.right - box.left + 12, box.bottom - box.top + 12); g.clip();
  draw(); g.restore();
}
function dot(g, x, y, radius) {
  g.beginPath(); g.arc(x, y, radius, 0, 2 * Math.PI); g.fill();
}
function star(g, x, y, radius) {
  g.beginPath();
  for (let k = 0; k < 10; k += 1) {
    const r = k % 2 ? radius * 0.45 : radius;
    g.lineTo(x + r * Math.sin((k * Math.PI) / 5), y - r * Math.cos((k * Math.PI) / 5));
  }
  g.closePath(); g.fill();
}

// ---- A chart: a canvas with what stays, and one above it for what follows the pointer ----------------
class Chart {
  constructor(id, label, parts) {
    this.element = typeof id === 'string' ? byId(id) : id;
    Object.assign(this, parts);
    this.points = []; // [x, y, trial, more] in pixels, for picking
    this.hovered = null;
    this.element.style.height = `${this.element.dataset.height || 300}px`;
    this.element.setAttribute('role', 'img');
    this.element.setAttribute('aria-label', label);
    this.base = this.element.appendChild(document.createElement('canvas'));
    this.above = this.element.appendChild(document.createElement('canvas'));
    this.element.addEventListener('pointermove', (event) => this.move(event));
    this.element.addEventListener('pointerleave', () => this.leave());
    this.element.addEventListener('click', (event) => this.click(event));
    this.fresh = false;
    this.visible = false;
    new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible && !this.fresh) this.redraw();
    }, { rootMargin: '200px' }).observe(this.element);
    new ResizeObserver(() => this.stale()).observe(this.element);
    charts.push(this);
  }
  stale() {
    this.fresh = false;
    if (this.visible && !this.waiting) {
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.redraw(); });
    }
  }
  context(canvas) {
    const width = this.element.clientWidth;
    const height = this.element.clientHeight;
    const ratio = printing ? 2 : Math.min(3, window.devicePixelRatio || 1);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = canvas.getContext('2d');
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [g, width, height];
  }
  redraw() {
    const [g, width, height] = this.context(this.base);
    if (width < 10) return;
    this.points = [];
    this.draw(g, width, height);
    this.fresh = true;
    this.element.dataset.drawn = 'yes';
    this.redrawAbove();
  }
  redrawAbove() {
    const [g] = this.context(this.above);
    const marked = [selected, this.hovered && this.hovered[2]].filter((t) => t !== null && t !== undefined);
    for (const trial of new Set(marked)) this.mark(g, trial);
  }
  pick(x, y, reach = 14) {
    let found = null;
    let nearest = reach * reach;
    for (const point of this.points) {
      const away = (point[0] - x) ** 2 + (point[1] - y) ** 2;
      if (away < nearest) { nearest = away; found = point; }
    }
    return found;
  }
  at(event) {
    const place = this.element.getBoundingClientRect();
    return [event.clientX - place.left, event.clientY - place.top];
  }
  move(event) {
    const found = this.pick(...this.at(event));
    this.element.style.cursor = found ? 'pointer' : '';
    if (found) showTip(event, [...describe(found[2]), ...(found[3] ? [found[3]] : [])]); else hideTip();
    if ((found && found[2]) !== (this.hovered && this.hovered[2])) { this.hovered = found; this.redrawAbove(); }
  }
  leave() { hideTip(); if (this.hovered) { this.hovered = null; this.redrawAbove(); } }
  click(event) { const found = this.pick(...this.at(event)); if (found) select(found[2]); }
  mark() {}
}
function empty(id, text) {
  const element = typeof id === 'string' ? byId(id) : id;
  element.classList.add('empty');
  element.dataset.drawn = 'yes';
  element.textContent = text;
}

function showTip(event, lines) {
  const tip = byId('tip');
  tip.textContent = lines.join('\n');
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 14 + width > innerWidth ? event.clientX - width - 10 : event.clientX + 14;
  const y = event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
function hideTip() { byId('tip').hidden = true; }

function select(trial) {
  selected = trial === selected ? null : trial;
  byId('selected').hidden = selected === null;
  if (selected !== null) {
    const [first, ...rest] = describe(selected);
    byId('selected-name').textContent = first;
    byId('selected-said').textContent = rest.join(' · ');
  }
  for (const chart of charts) if (chart.fresh) chart.redrawAbove();
  drawTable();
}
byId('selected-clear').addEventListener('click', () => select(selected));

function redrawAll() { for (const chart of charts) { chart.fresh = false; if (chart.visible || printing) chart.redraw(); } }
byId('theme').addEventListener('click', () => {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  redrawAll();
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);
// On paper all is light and laid out for its width, which the charts must know before they are drawn.
let themeOnScreen;
addEventListener('beforeprint', () => {
  themeOnScreen = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = 'light';
  document.documentElement.classList.add('printing');
  printing = true;
  redrawAll();
});
addEventListener('afterprint', () => {
  printing = false;
  document.documentElement.classList.remove('printing');
  if (themeOnScreen) document.documentElement.dataset.theme = themeOnScreen; else delete document.documentElement.dataset.theme;
  redrawAll();
});

for (const group of document.querySelectorAll('.switch')) {
  group.addEventListener('click', (event) => {
    const button = event.target.closest('button');
    if (!button) return;
    for (const other of group.children) other.setAttribute('aria-pressed', String(other === button));
    group.dataset.value = button.dataset.value;
    for (const chart of charts) if (chart.element.id === group.dataset.for) chart.redraw();
  });
}
function switched(name) {
  return document.querySelector(`.switch[data-for=${name}] [aria-pressed=true]`).dataset.value;
}
document.addEventListener('click', async (event) => {
  const button = event.target.closest('.copy');
  if (!button) return;
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.body.appendChild(Object.assign(document.createElement('textarea'), { value: text }));
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 1500);
});
