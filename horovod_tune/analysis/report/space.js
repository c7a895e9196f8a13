// The hyperparameters: parallel coordinates, one against the metric, two together.

const ranges = new Map(); // axis number -> [low, high] as parts of its height
function passes(trial) { return brushed(trial); }

function heightOn(axis, trial) {
  if (axis === D.params.length) {
    const value = D.value[trial];
    if (value === null) return null;
    const [low, high] = D.value_limits;
    return Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
  }
  const param = D.params[axis];
  let at = position(param, trial);
  if (at === null) return null;
  if (param.kind === 'category') at += 0.36 * jitter(trial);
  return (at - param.limits[0]) / (param.limits[1] - param.limits[0] || 1);
}

function drawParallel(g, width, height) {
  const count = D.params.length + 1;
  const box = { left: 14, right: width - 64, top: 34, bottom: height - 10 };
  const across = (axis) => box.left + (axis / (count - 1)) * (box.right - box.left);
  const up = (part) => box.bottom - part * (box.bottom - box.top);
  Object.assign(this, { across, up, box, count });
  const order = [...Array(N).keys()].filter((t) => D.value[t] !== null).sort((a, b) => badness(D.value[b]) - badness(D.value[a]));
  const kept = order.filter(passes);
  const alpha = Math.min(0.85, Math.max(0.1, 150 / Math.max(1, kept.length)));
  g.lineWidth = kept.length > 60 ? 1 : 1.7;
  if (ranges.size) for (const trial of order) if (!passes(trial)) this.line(g, trial, isDark() ? 'rgba(130,140,155,.05)' : 'rgba(90,98,112,.05)');
  for (const trial of kept) this.line(g, trial, tint(trial, alpha), true);
  if (D.best !== null && passes(D.best)) { g.lineWidth = 2.8; this.line(g, D.best, css('--best')); }
  g.font = '12px system-ui, sans-serif';
  for (let axis = 0; axis < count; axis += 1) this.rule(g, axis);
}

function parallelParts() {
  return {
    draw: drawParallel,
    line(g, trial, colour, collect) {
      g.strokeStyle = colour;
      g.beginPath();
      let pen = false;
      for (let axis = 0; axis < this.count; axis += 1) {
        const part = heightOn(axis, trial);
        if (part === null) { pen = false; continue; }
        const [x, y] = [this.across(axis), this.up(part)];
        if (pen) g.lineTo(x, y); else g.moveTo(x, y);
        pen = true;
        if (collect) this.points.push([x, y, trial]);
      }
      g.stroke();
    },
    rule(g, axis) {
      const x = this.across(axis);
      const param = D.params[axis];
      g.strokeStyle = css('--soft');
      g.lineWidth = 1.2;
      line(g, x, this.box.top, x, this.box.bottom);
      const range = ranges.get(axis);
      if (range) {
        g.fillStyle = css('--accent');
        g.globalAlpha = 0.3;
        g.fillRect(x - 7, this.up(range[1]), 14, this.up(range[0]) - this.up(range[1]));
        g.globalAlpha = 1;
      }
      g.textBaseline = 'alphabetic';
      g.textAlign = axis === 0 ? 'left' : 'center';
      g.fillStyle = css('--ink');
      const name = param ? param.name : D.metric;
      g.font = '600 12px system-ui, sans-serif';
      const room = (this.box.right - this.box.left) / (this.count - 1) - 8;
      g.fillText(name, axis === 0 ? 0 : x, 16, axis === 0 ? room * 0.7 : room);
      g.font = '11.5px system-ui, sans-serif';
      g.textAlign = 'left';
      g.textBaseline = 'middle';
      for (const [part, text] of this.marks(param)) {
        const y = this.up(part);
        const wide = g.measureText(text).width;
        g.fillStyle = css('--card');
        g.globalAlpha = 0.78;
        g.fillRect(x + 4, y - 8, wide + 5, 16);
        g.globalAlpha = 1;
        g.fillStyle = css('--ink');
        g.fillText(text, x + 6, y);
      }
    },
    marks(param) {
      const [low, high] = param ? param.limits : D.value_limits;
      let ticks = param && paramAxis(param).ticks;
      ticks = ticks || (param && param.log ? logTicks(low, high) : niceTicks(low, high, 5));
      return ticks.map(({ at, text }) => [(at - low) / (high - low || 1), text]);
    },
    mark(g, trial) {
      if (!this.box || (D.value[trial] === null)) return;
      g.lineWidth = 6;
      this.line(g, trial, css('--card'));
      g.lineWidth = 2.8;
      this.line(g, trial, trial === D.best ? css('--best') : css('--ink'));
    },
  };
}

// Dragging along an axis keeps the trials within; on a touch screen dragging scrolls the page instead.
function enableBrush(chart) {
  let from = null;
  const part = (y) => Math.min(1, Math.max(0, (chart.box.bottom - y) / (chart.box.bottom - chart.box.top)));
  chart.element.addEventListener('pointerdown', (event) => {
    if (event.pointerType === 'touch' || !chart.box) return;
    const [x, y] = chart.at(event);
    const axis = [...Array(chart.count).keys()].find((k) => Math.abs(chart.across(k) - x) < 12);
    if (axis === undefined) return;
    from = { axis, y, moved: false };
    chart.element.setPointerCapture(event.pointerId);
  });
  chart.element.addEventListener('pointermove', (event) => {
    if (!from) return;
    const y = chart.at(event)[1];
    if (Math.abs(y - from.y) < 4 && !from.moved) return;
    from.moved = true;
    const ends = [part(from.y), part(y)].sort((a, b) => a - b);
    ranges.set(from.axis, ends);
    rebrush(chart);
  });
  chart.element.addEventListener('pointerup', () => {
    if (from && !from.moved && ranges.delete(from.axis)) rebrush(chart);
    chart.dragged = Boolean(from && from.moved);
    from = null;
  });
  byId('parallel-clear').addEventListener('click', () => { ranges.clear(); rebrush(chart); });
}
function rebrush(chart) {
  brushed = (trial) => [...ranges].every(([axis, [low, high]]) => {
    const part = heightOn(axis, trial);
    return part !== null && part >= low - 1e-9 && part <= high + 1e-9;
  });
  byId('parallel-clear').hidden = !ranges.size;
  chart.stale();
  for (const tell of onFilter) tell();
}

function pointsChart(element, label, xOf, yOf, axes, more = {}) {
  return new Chart(element, label, {
    draw(g, width, height) {
      const [x, y] = axes();
      const scales = frame(g, width, height, x, y, more);
      this.scales = scales;
      const radius = N > 1500 ? 1.8 : N > 300 ? 2.4 : 3.6;
      const alpha = N > 1500 ? 0.5 : 0.75;
      clipTo(g, scales.box, () => {
        for (let trial = 0; trial < N; trial += 1) {
          const [vx, vy] = [xOf(trial), yOf(trial)];
          if (vx === null || vy === null) continue;
          const [px, py] = [scales.sx(vx), scales.sy(vy)];
          g.fillStyle = tint(trial, alpha);
          dot(g, px, py, radius);
          this.points.push([px, py, trial]);
        }
        this.symbol(g, D.best, css('--best'), true);
      });
    },
    symbol(g, trial, colour, best) {
      if (trial === null || !this.scales) return;
      const [vx, vy] = [xOf(trial), yOf(trial)];
      if (vx === null || vy === null) return;
      const [px, py] = [this.scales.sx(vx), this.scales.sy(vy)];
      g.fillStyle = css('--card');
      if (best) star(g, px, py, 11); else dot(g, px, py, 8);
      g.fillStyle = colour;
      if (best) star(g, px, py, 9); else dot(g, px, py, 6);
    },
    mark(g, trial) { this.symbol(g, trial, trial === D.best ? css('--best') : css('--ink'), trial === D.best); },
  });
}

const spread = (param, salt) => (trial) => {
  const at = position(param, trial);
  return at === null || param.kind !== 'category' ? at : at + 0.36 * jitter(trial, salt);
};

if (!D.metric || !D.params.length) {
  document.querySelector('.pick').hidden = true;
  for (const id of ['parallel', 'pair']) empty(id, D.metric ? 'No hyperparameter varies among the trials.' : 'There is no metric to draw.');
} else {
  const holder = byId('parallel');
  holder.style.minWidth = `${(D.params.length + 1) * 92}px`;
  const parallel = new Chart('parallel', 'Parallel coordinates of all hyperparameters', parallelParts());
  enableBrush(parallel);
  const clicked = parallel.click.bind(parallel);
  parallel.click = (event) => { if (parallel.dragged) parallel.dragged = false; else clicked(event); };
  const drag = matchMedia('(pointer: fine)').matches ? 'Drag along an axis to keep only the trials that pass there; the table follows. ' : '';
  byId('parallel-said').textContent = `${drag}${drag ? 'Click' : 'Touch'} a line for its trial.`;

  const few = D.params.slice(0, 24);
  for (const param of few) {
    const card = byId('multiples').appendChild(document.createElement('div'));
    card.className = 'card';
    const head = card.appendChild(document.createElement('div'));
    head.className = 'card-head';
    const title = head.appendChild(document.createElement('h3'));
    title.textContent = param.name;
    title.title = param.name;
    const plot = card.appendChild(document.createElement('div'));
    plot.className = 'plot';
    plot.dataset.height = 190;
    const [low, high] = D.value_limits;
    pointsChart(plot, `${D.metric} against ${param.name}`, spread(param, 1), (trial) => D.value[trial],
      () => [{ ...paramAxis(param), label: '' }, { low, high, label: D.metric }]);
  }
  if (D.params.length > few.length) byId('multiples').append(`${D.params.length - few.length} more hyperparameters are in the table.`);

  const [pickX, pickY] = [byId('pair-x'), byId('pair-y')];
  for (const pick of [pickX, pickY]) D.params.forEach((param, k) => pick.add(new Option(param.name, k)));
  if (D.params.length < 2) {
    document.querySelector('.pick').hidden = true;
    empty('pair', 'It takes two hyperparameters that vary.');
  } else {
    const ranked = [...document.querySelectorAll('.bar-name')].map((e) => D.params.findIndex((p) => p.name === e.textContent)).filter((k) => k >= 0);
    pickX.value = ranked[0] ?? 0;
    pickY.value = ranked[1] ?? 1;
    const of = (pick) => D.params[pick.value];
    const pair = pointsChart('pair', 'Two hyperparameters, coloured by the metric', (t) => spread(of(pickX), 1)(t), (t) => (D.value[t] === null ? null : spread(of(pickY), 2)(t)),
      () => [paramAxis(of(pickX)), paramAxis(of(pickY))]);
    for (const pick of [pickX, pickY]) pick.addEventListener('change', () => pair.redraw());
  }
}
