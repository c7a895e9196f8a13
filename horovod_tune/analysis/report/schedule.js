// Rungs and stops, and the timeline of ranks.

const FATES = [['went on', '--accent'], ['stopped', '--second'], ['failed', '--fail'], ['running', '--good']];

function drawRungs(g, width, height) {
  const { steps } = D.rungs;
  const [low, high] = D.curve_limits;
  const text = (step) => `${step.iteration}\n${step.trials.length} came, ${step.fates.filter((f) => f === 'went on').length} on`;
  const narrow = width / steps.length < 90;
  const ticks = steps.map((step, at) => ({ at, text: narrow ? `${step.iteration}\n${step.trials.length}` : text(step) }));
  const scales = frame(g, width, height, { low: -0.5, high: steps.length - 0.5, ticks, label: ' ' }, { low, high, label: `${D.metric} at the rung` });
  const most = Math.max(...steps.map((s) => s.trials.length));
  const radius = most > 1000 ? 1.6 : most > 200 ? 2.2 : 3.4;
  clipTo(g, scales.box, () => {
    steps.forEach((step, at) => {
      for (let k = 0; k < step.trials.length; k += 1) {
        if (step.values[k] === null) continue;
        const fate = FATES.findIndex(([name]) => name === step.fates[k]);
        const x = scales.sx(at + (fate ? 0.2 : -0.2) + 0.26 * jitter(step.trials[k]));
        const y = scales.sy(step.values[k]);
        g.fillStyle = css(FATES[fate][1]);
        g.globalAlpha = 0.65;
        if (fate === 0) dot(g, x, y, radius); else if (fate === 1) cross(g, x, y, radius); else g.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
        g.globalAlpha = 1;
        this.points.push([x, y, step.trials[k], `at iteration ${step.iteration}: ${short(step.values[k])}, ${step.fates[k]}`]);
      }
    });
  });
}
function cross(g, x, y, radius) {
  g.beginPath();
  const [thin, wide] = [radius * 0.35, radius * 1.15];
  g.save();
  g.translate(x, y);
  g.rotate(Math.PI / 4);
  g.fillRect(-wide, -thin, 2 * wide, 2 * thin);
  g.fillRect(-thin, -wide, 2 * thin, 2 * wide);
  g.restore();
}

if (!D.metric) {
  empty('rungs', 'There is no metric to draw.');
} else if (D.rungs.steps.length < 2) {
  empty('rungs', 'All trials ended at one iteration: there were no rungs.');
  byId('rungs').style.height = '70px';
} else {
  new Chart('rungs', 'Trials at each rung, and what became of them', {
    draw(g, width, height) { paint('rungs-said'); drawRungs.call(this, g, width, height); },
    mark(g, trial) { for (const [x, y, t] of this.points) if (t === trial) { g.fillStyle = css('--ink'); dot(g, x, y, 6); } },
  });
}
function paint(id) {
  const seen = new Set(D.rungs.steps.flatMap((step) => step.fates));
  const names = FATES.filter(([name]) => seen.has(name));
  const where = byId(id);
  where.replaceChildren();
  for (const [name, colour] of names) legend(where, name, css(colour));
  where.append(D.rungs.known ? "These are the scheduler's own rungs." : 'The rungs are not written down: these are the iterations at which trials ended.');
}
function legend(where, name, colour) {
  const swatch = where.appendChild(document.createElement('span'));
  swatch.style.cssText = `display:inline-block;width:12px;height:12px;border-radius:3px;vertical-align:-1px;margin-right:6px;background:${colour}`;
  where.append(name + ' \u2002 ');
}

function drawTimeline(g, width, height) {
  const { bars, rows } = D.timeline;
  let [first, last] = [0, 0];
  for (const bar of bars) { first = Math.min(first, bar[2]); last = Math.max(last, bar[4]); }
  const [unit, length] = timeAxis(last);
  const every = Math.max(1, Math.ceil((rows.length * 14) / (height - 60)));
  const ticks = rows.map((text, k) => ({ at: -k, text: text || String(k + 1) })).filter((_, k) => k % every === 0);
  const x = { low: first / length, high: last / length || 1, label: `wall-clock time (${unit})` };
  const { sx, sy, box } = frame(g, width, height, x, { low: -(rows.length - 0.4), high: 0.6, ticks, label: D.timeline.unit }, { maxLeft: Math.min(150, width * 0.28) });
  const thick = Math.max(1, Math.abs(sy(0) - sy(-1)) * 0.82);
  Object.assign(this, { sx, sy, thick, length });
  const drawn = new Array(rows.length).fill(0);
  clipTo(g, box, () => {
    for (const bar of bars) {
      const [trial, row, begin, trained, end] = bar;
      drawn[row] += 1;
      const best = trial === D.best;
      g.fillStyle = css(best ? '--best' : T.status[trial] === 'ERROR' ? '--fail' : drawn[row] % 2 ? '--accent' : '--tone');
      const [x0, x1, x2, y] = [sx(begin / length), sx(trained / length), sx(end / length), sy(-row) - thick / 2];
      // Parts of a pixel are drawn as such, so that thousands of short trials keep their share of the row.
      const least = bars.length > 500 && !best ? 0 : 0.7;
      g.fillRect(x1, y, Math.max(least, x2 - x1 - (x2 - x1 > 4 ? 1 : 0)), thick);
      if (trained > begin) this.hatch(g, x0, y, Math.max(least, x1 - x0), thick);
    }
  });
}
if (!D.timeline.bars.length) {
  empty('timeline', 'No trial has begun.');
} else {
  const holder = byId('timeline');
  holder.dataset.height = Math.min(560, Math.max(130, 70 + 20 * D.timeline.rows.length));
  new Chart('timeline', 'Which trial held which ranks when', {
    draw(g, width, height) { sayTimeline(); drawTimeline.call(this, g, width, height); },
    hatch(g, x, y, wide, high) {
      g.fillStyle = css('--start');
      g.fillRect(x, y, wide, high);
      if (wide < 6) return;
      g.save();
      g.beginPath(); g.rect(x, y, wide, high); g.clip();
      g.strokeStyle = 'rgba(0,0,0,.55)';
      g.lineWidth = 1;
      for (let k = -high; k < wide; k += 5) line(g, x + k, y + high, x + k + high, y);
      g.restore();
    },
    pick(x, y) {
      const found = D.timeline.bars.find(([, row, begin, , end]) => Math.abs(this.sy(-row) - y) <= this.thick / 2 + 1
        && x >= this.sx(begin / this.length) - 1 && x <= this.sx(end / this.length) + 1);
      if (!found) return null;
      const began = found[3] - found[2];
      return [x, y, found[0], began > 0 ? `start-up ${short(began)} s` : ''];
    },
    mark(g, trial) {
      g.strokeStyle = css('--ink');
      g.lineWidth = 2.5;
      for (const [t, row, begin, , end] of D.timeline.bars) {
        if (t !== trial) continue;
        const [x0, x1] = [this.sx(begin / this.length), this.sx(end / this.length)];
        g.strokeRect(x0, this.sy(-row) - this.thick / 2, Math.max(2, x1 - x0), this.thick);
      }
    },
  });
  if (D.timeline.unit === 'trials at once') byId('timeline-title').textContent = 'Which trials ran when';
}
function sayTimeline() {
  const where = byId('timeline-said');
  where.replaceChildren();
  legend(where, 'training', css('--accent'));
  const starts = D.timeline.bars.some((bar) => bar[3] > bar[2]);
  if (starts) legend(where, 'starting up', css('--start'));
  if (D.best !== null) legend(where, 'the best trial', css('--best'));
  if (T.status.includes('ERROR')) legend(where, 'failed', css('--fail'));
  if (!starts) where.append('How long trials took to start is not written down.');
}
