// The best value so far, and every trial's learning curve.

function drawBest(g, width, height) {
  const against = switched('best');
  const [xs, ys] = against === 'time' ? D.best_time : D.best_trials;
  if (!xs.length) return;
  const [unit, length] = against === 'time' ? timeAxis(xs[xs.length - 1]) : ['trials', 1];
  const low = Math.min(...ys);
  const high = Math.max(...ys);
  const pad = 0.08 * (high - low) || Math.abs(high) * 0.05 || 1;
  const x = { low: 0, high: (xs[xs.length - 1] / length) * 1.02 || 1, label: against === 'time' ? `wall-clock time (${unit})` : 'trials' };
  const { sx, sy } = frame(g, width, height, x, { low: low - pad, high: high + pad, label: D.metric });
  g.strokeStyle = css('--accent');
  g.lineWidth = 2.2;
  g.lineJoin = 'round';
  g.beginPath();
  xs.forEach((v, k) => {
    if (k) g.lineTo(sx(v / length), sy(ys[k - 1])); else g.moveTo(sx(v / length), sy(ys[k]));
    g.lineTo(sx(v / length), sy(ys[k]));
  });
  g.stroke();
  g.fillStyle = css('--accent');
  const end = xs.length - 1;
  xs.forEach((v, k) => { if (k < end || !end) dot(g, sx(v / length), sy(ys[k]), 3); });
  const text = short(ys[end]);
  g.font = '600 13px system-ui, sans-serif';
  g.textAlign = 'right';
  g.textBaseline = D.mode === 'max' ? 'top' : 'bottom';
  g.fillStyle = css('--ink');
  g.fillText(text, sx(xs[end] / length) - 2, sy(ys[end]) + (D.mode === 'max' ? 6 : -6));
}

const MAY_GO_ON = new Set(['PAUSED', 'RUNNING', 'PENDING']);

function drawCurves(g, width, height) {
  const axis = switched('curves') === 'iteration' ? 0 : 1;
  let last = 0;
  for (const curve of D.curves) for (const v of curve[axis]) if (v > last) last = v;
  if (!axis) for (const one of D.expected) if (one && one[0][one[0].length - 1] > last) last = one[0][one[0].length - 1];
  const [unit, length] = axis ? timeAxis(last) : ['iteration', 1];
  const [low, high] = D.curve_limits;
  const x = { low: axis ? 0 : Math.min(1, last - 1), high: last / length || 1, label: axis ? `wall-clock time (${unit})` : 'iteration' };
  const scales = frame(g, width, height, x, { low, high, label: D.metric });
  Object.assign(this, { scales, axis, length });
  const alpha = Math.min(0.9, Math.max(axis ? 0.35 : 0.1, 90 / N));
  const order = [...D.curves.keys()].sort((a, b) => (badness(D.value[b] ?? Infinity) - badness(D.value[a] ?? Infinity)) || a - b);
  g.lineWidth = N > 60 ? 1 : 1.6;
  clipTo(g, scales.box, () => {
    for (const trial of order) this.line(g, trial, tint(trial, alpha), true);
    for (const trial of order) if (MAY_GO_ON.has(T.status[trial])) this.expect(g, trial, tint(trial, alpha));
    if (D.best !== null) {
      g.lineWidth = 2.6;
      this.line(g, D.best, css('--best'), false);
    }
  });
}

if (!D.metric) {
  for (const id of ['best', 'curves']) empty(id, 'There is no metric to draw.');
} else {
  new Chart('best', `Best ${D.metric} so far`, { draw: drawBest });
  new Chart('curves', `${D.metric} of every trial`, {
    draw: drawCurves,
    line(g, trial, colour, collect) {
      const [xs, ys] = [D.curves[trial][this.axis], D.curves[trial][2]];
      const { sx, sy, box } = this.scales;
      g.strokeStyle = colour;
      g.fillStyle = colour;
      g.beginPath();
      let pen = false;
      let before = -Infinity;
      for (let k = 0; k < xs.length; k += 1) {
        if (xs[k] === null || ys[k] === null) { pen = false; continue; }
        const px = sx(xs[k] / this.length);
        const py = sy(ys[k]);
        if (pen && xs[k] >= before) g.lineTo(px, py); else g.moveTo(px, py);
        pen = true;
        before = xs[k];
        if (collect && py >= box.top - 6 && py <= box.bottom + 6) this.points.push([px, py, trial, `iteration ${D.curves[trial][0][k]}: ${short(ys[k])}`]);
        if (xs.length === 1) dot(g, px, py, 2);
      }
      g.stroke();
    },
    // How the search expects a trial to go on; with a band where one looks at it.
    expect(g, trial, colour, band = false) {
      const one = D.expected[trial];
      if (!one || this.axis) return;
      const { sx, sy } = this.scales;
      const [xs, middle, low, high] = one;
      if (band) {
        g.save();
        g.globalAlpha = 0.2;
        g.fillStyle = colour;
        g.beginPath();
        xs.forEach((v, k) => g.lineTo(sx(v), sy(high[k])));
        for (let k = xs.length - 1; k >= 0; k -= 1) g.lineTo(sx(xs[k]), sy(low[k]));
        g.closePath();
        g.fill();
        g.restore();
      }
      g.save();
      g.setLineDash([5, 4]);
      g.strokeStyle = colour;
      g.beginPath();
      xs.forEach((v, k) => g.lineTo(sx(v), sy(middle[k])));
      g.stroke();
      g.restore();
    },
    mark(g, trial) {
      if (!this.scales) return;
      clipTo(g, this.scales.box, () => {
        g.lineJoin = 'round';
        g.lineWidth = 6;
        this.line(g, trial, css('--card'), false);
        g.lineWidth = 2.6;
        const colour = trial === D.best ? css('--best') : css('--ink');
        this.line(g, trial, colour, false);
        g.lineWidth = 1.8;
        this.expect(g, trial, colour, true);
      });
    },
  });
  const said = [N > OKABE_ITO.length ? 'Colour tells the value: the strongest is best.' : '', 'Orange: the best trial.'];
  if (D.curve_limits[2]) said.push(`${D.curve_limits[2].toLocaleString('en')} far-off values lie outside the picture.`);
  if (D.expected.some((one) => one)) said.push('Dashed: how the search expects a trial to go on; point at a trial for the band that about 80 of 100 reports lie in.');
  if (D.thinned) said.push(`Each curve is drawn with at most ${D.thinned} points.`);
  byId('curves-said').textContent = said.filter(Boolean).join(' ');
}
