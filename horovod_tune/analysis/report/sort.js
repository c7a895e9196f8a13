// Sorts the table of trials by the column that is clicked; cells without a value stay last either way.
(() => {
  'use strict';
  const table = document.getElementById('table');
  const heads = [...table.tHead.rows[0].cells];
  const key = (cell) => cell.dataset.v ?? cell.textContent;
  heads.forEach((head, column) => {
    head.firstChild.addEventListener('click', () => {
      const up = head.getAttribute('aria-sort') !== 'ascending';
      const rows = [...table.tBodies[0].rows].map((row) => [key(row.cells[column]), row]);
      const number = head.className === 'n';
      rows.sort(([a], [b]) => {
        if (a === '' || b === '') return (a === '') - (b === '');
        const order = number ? a - b : a.localeCompare(b, 'en', { numeric: true });
        return up ? order : -order;
      });
      heads.forEach((other) => other.setAttribute('aria-sort', 'none'));
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      table.tBodies[0].replaceChildren(...rows.map(([, row]) => row));
    });
  });
})();
