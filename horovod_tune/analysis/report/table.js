// The table of trials: sorts, filters, shows fifty at a time.

const PAGE = 50;
const columns = [
  { name: 'trial', get: (t) => T.id[t] },
  { name: 'status', get: (t) => T.status[t].toLowerCase() },
];
if (D.metric) {
  columns.push(
    { name: D.metric, number: true, get: (t) => T.last[t] },
    { name: `best ${D.metric}`, number: true, get: (t) => T.best[t] },
    { name: 'at iteration', number: true, get: (t) => T.best_iteration[t] },
  );
}
if (D.metric && D.expected.some((one) => one)) {
  const end = (t) => { const one = D.expected[t]; return one ? one[1][one[1].length - 1] : null; };
  columns.push({ name: `expected ${D.metric}`, number: true, get: end });
}
columns.push(
  { name: 'iterations', number: true, get: (t) => T.iterations[t] },
  { name: 'time', number: true, get: (t) => T.duration[t], show: (t) => T.duration_text[t] },
);
if (T.ranks.some((r) => r !== null)) columns.push({ name: 'ranks', number: true, get: (t) => T.ranks[t] });
for (const param of D.params) {
  const numeric = param.kind === 'numeric';
  columns.push({ name: param.name, number: numeric, get: (t) => (numeric ? param.values[t] : valueOf(param, t)), show: (t) => valueOf(param, t) });
}
if (T.error.some((e) => e)) columns.push({ name: 'error', get: (t) => T.error[t] });

let sorted = { column: D.metric ? (D.scope === 'all' ? 3 : 2) : 0, up: D.mode !== 'max' };
let page = 0;
let rows = [];

const text = (column, trial) => (column.show ? column.show(trial) : short(column.get(trial)));

// "lr<0.01 status=error relu": each word must hold; a comparison names a column, anything else is looked for.
function conditions(query) {
  return query.trim().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, wanted] = word.match(/^(.+?)(<=|>=|!=|<|>|=|:)(.+)$/) || [];
    const column = name && columns.find((c) => c.name.toLowerCase() === name.toLowerCase());
    if (!column) return (t) => columns.some((c) => text(c, t).toLowerCase().includes(word.toLowerCase()));
    const limit = Number(wanted);
    const same = (t) => (column.number && !Number.isNaN(limit) ? column.get(t) === limit : text(column, t).toLowerCase() === wanted.toLowerCase());
    if (sign === '=' || sign === ':') return same;
    if (sign === '!=') return (t) => !same(t);
    const holds = { '<': (v) => v < limit, '<=': (v) => v <= limit, '>': (v) => v > limit, '>=': (v) => v >= limit }[sign];
    return (t) => { const v = column.get(t); return v !== null && v !== '' && holds(Number(v)); };
  });
}

function arrange() {
  const wanted = conditions(byId('filter').value);
  const column = columns[sorted.column];
  rows = [...Array(N).keys()].filter((t) => brushed(t) && wanted.every((holds) => holds(t)));
  const sign = sorted.up ? 1 : -1;
  rows.sort((a, b) => {
    const [x, y] = [column.get(a), column.get(b)];
    const [noX, noY] = [x === null || x === '', y === null || y === ''];
    if (noX || noY) return noX - noY || a - b; // what is missing stands last either way
    return (column.number ? x - y : String(x).localeCompare(String(y), 'en', { numeric: true })) * sign || a - b;
  });
  page = 0;
  drawTable();
}

function drawTable() {
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  const body = byId('table').tBodies[0];
  body.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map((trial) => {
    const row = document.createElement('tr');
    row.dataset.trial = trial;
    row.tabIndex = 0;
    row.classList.toggle('best-row', trial === D.best);
    row.classList.toggle('chosen', trial === selected);
    columns.forEach((column) => {
      const cell = row.insertCell();
      cell.textContent = text(column, trial);
      if (column.number) cell.className = 'n';
      if (cell.textContent.length > 30) cell.title = cell.textContent;
    });
    return row;
  }));
  const many = (n) => n.toLocaleString('en');
  byId('count').textContent = rows.length === N ? `${many(N)} trials` : `${many(rows.length)} of ${many(N)} trials`;
  byId('page').textContent = rows.length ? `${many(page * PAGE + 1)} to ${many(Math.min(rows.length, (page + 1) * PAGE))}` : 'No trial matches';
  byId('previous').disabled = page === 0;
  byId('next').disabled = page >= pages - 1;
  byId('table').querySelectorAll('th').forEach((head, k) => {
    head.setAttribute('aria-sort', k !== sorted.column ? 'none' : sorted.up ? 'ascending' : 'descending');
    head.firstChild.textContent = columns[k].name + (k !== sorted.column ? '' : sorted.up ? ' ↑' : ' ↓');
  });
}

const headRow = byId('table').tHead.insertRow();
columns.forEach((column, k) => {
  const head = headRow.appendChild(document.createElement('th'));
  head.scope = 'col';
  if (column.number) head.className = 'n';
  const button = head.appendChild(document.createElement('button'));
  button.type = 'button';
  button.addEventListener('click', () => { sorted = { column: k, up: sorted.column === k ? !sorted.up : true }; arrange(); });
});
byId('table').tBodies[0].addEventListener('click', (event) => {
  const row = event.target.closest('tr');
  if (row) select(Number(row.dataset.trial));
});
byId('table').tBodies[0].addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || !event.target.dataset.trial) return;
  const { trial } = event.target.dataset;
  select(Number(trial));
  byId('table').querySelector(`tr[data-trial="${trial}"]`)?.focus();
});
byId('previous').addEventListener('click', () => { page -= 1; drawTable(); });
byId('next').addEventListener('click', () => { page += 1; drawTable(); });
byId('filter').addEventListener('input', arrange);
onFilter.push(arrange);
arrange();
document.documentElement.dataset.ready = 'yes';
