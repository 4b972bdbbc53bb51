/* The address says what is on show: ?run=ID&step=N&token=M. Other parameters stay; nothing is loaded from here. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.address) return;
  const { store } = R;
  const asked = new URLSearchParams(location.search);
  let honoured = false;
  let timer = 0;

  const number = (value) => (value !== null && /^\d{1,7}$/.test(value) ? Number(value) : null);

  const write = () => {
    timer = 0;
    const { run, selection, chosen, position, live } = store.state;
    if (!run) return;
    const query = new URLSearchParams(location.search);
    if (store.state.meta) query.set("run", run.id);
    else query.delete("run");
    query.delete("step");
    query.delete("token");
    if (chosen === "token" && selection) {
      query.set("step", String(selection.step));
      query.set("token", String(selection.token));
    } else if (chosen === "step" && !live) query.set("step", String(position));
    const text = query.toString();
    const to = `${location.pathname}${text ? "?" + text : ""}${location.hash}`;
    if (to === `${location.pathname}${location.search}${location.hash}`) return;
    try {
      history.replaceState(history.state, "", to);
    } catch {
      /* a page without an address of its own (a saved copy, a frame) has none to keep */
    }
  };
  /** Browsers refuse more than about three changes a second for long. */
  const soon = () => {
    if (!timer) timer = setTimeout(write, 150);
  };

  /** Once, for the run that the address names (or the first one, when it names none). */
  const honour = () => {
    const { run, rows, live } = store.state;
    if (honoured || !run || live || !rows.length) return;
    const wanted = asked.get("run");
    if (wanted && wanted !== run.id) return;
    honoured = true;
    const step = number(asked.get("step"));
    const token = number(asked.get("token"));
    if (step === null || step > store.last()) return;
    if (token !== null && store.valid({ step, token })) store.choose({ step, token });
    else store.moveTo(step, { select: true });
  };

  store.subscribe((event) => {
    if (event === "run" && store.state.live) honoured = true;
    if (event === "run" && honoured) soon();
    if (event === "end") honour();
    if (["selection", "chosen", "position"].includes(event) && store.state.chosen) soon();
  });
  R.address = { write: soon };
})();
