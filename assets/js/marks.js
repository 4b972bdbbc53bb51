/* Tokens as elements: the same mark, name and shape wherever a token stands. Also what pointer and keyboard do to them.

   Every token element carries data-s, data-t (its step and token), data-mark and a spoken label. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.marks) return;
  const { h, text, model } = R;
  const CHIP_CHARS = 28;

  const dress = (element, row, token, role) => {
    const described = model.describe(row, token);
    element.dataset.s = token.step;
    element.dataset.t = token.token;
    element.dataset.mark = token.mark;
    element.setAttribute("aria-label", described);
    element.title = described;
    element.tabIndex = -1;
    if (role) element.setAttribute("role", role);
    return element;
  };

  /** What a chip writes: the token's own text, or which part of a character it is. */
  const fillChip = (element, token, short = element.dataset.short !== undefined) => {
    R.clear(element);
    const { part } = token;
    if (part && token.emitted) {
      const whole = part.n === part.of;
      text.render(element, token.flow, "chip", CHIP_CHARS);
      const words = short ? `${part.n}/${part.of}` : `part ${part.n} of ${part.of}`;
      element.append(h("span.rl-part", { text: `${token.flow ? " " : ""}${whole ? "" : "◌ "}${words}` }));
      return;
    }
    if (token.label) text.render(element, token.label, "chip", CHIP_CHARS);
    else element.append(h("span.rl-part", { text: token.silent ? "(no text)" : "◌" }));
  };

  /** Monospaced chip for Tokens mode and, as a button and in few words, for the ladder. */
  const chip = (row, token, tag = "span", role = null) => {
    const element = dress(h(`${tag}.rl-chip`, tag === "button" ? { type: "button", "data-short": "" } : {}), row, token, role);
    fillChip(element, token);
    return element;
  };

  /** Running text. Discarded drafts never break lines; kept tokens carry what they add to the text. */
  const flow = (row, token, whitespace) => {
    const element = dress(h("span.rl-tok"), row, token, "option");
    fillFlow(element, token, whitespace);
    return element;
  };

  const fillFlow = (element, token, whitespace) => {
    R.clear(element);
    element.classList.toggle("rl-silent", token.flow === "");
    const words = token.flow === null ? token.label : token.flow;
    if (!words) return;
    const mode = token.flow === null ? (whitespace ? "chip" : "struck") : whitespace ? "shown" : "flow";
    // The space before a word stands outside its stroke; accepted text keeps one unbroken line.
    const space = token.mark === "accepted" || !words.trim() ? "" : words.match(/^ */)[0];
    text.render(element, space, mode);
    const stroke = h("span.rl-stroke");
    const rest = words.slice(space.length);
    const behind = token.beyond ? [...rest].slice(-token.beyond).join("") : "";
    text.render(stroke, rest.slice(0, rest.length - behind.length), mode, token.flow === null ? 400 : Infinity);
    element.append(stroke);
    if (behind) element.append(text.render(h("span.rl-beyond", { title: "ended the text; not part of it" }), behind, "chip"));
  };

  /** The name of a mark, set as it looks. */
  const sample = (mark, wording) => h("span.rl-sample", { "data-mark": mark, title: model.MARKS[mark].what, text: wording || model.MARKS[mark].name });

  // --- pointer and keyboard ---------------------------------------------------------------------------------------

  const place = (target) => {
    const element = target instanceof Element ? target.closest("[data-s][data-t]") : null;
    return element ? { step: Number(element.dataset.s), token: Number(element.dataset.t) } : null;
  };

  let leaving = 0;
  /** Delegate selection and preview for all tokens inside `root`. */
  const listen = (root) => {
    root.addEventListener("focusin", (event) => {
      const at = place(event.target);
      if (at) R.store.choose(at);
    });
    root.addEventListener("click", (event) => {
      const at = place(event.target);
      if (!at) return;
      const element = event.target.closest("[data-s][data-t]");
      if (document.activeElement !== element) element.focus({ preventScroll: true });
      R.store.choose(at);
    });
    root.addEventListener("pointerover", (event) => {
      if (event.pointerType === "touch") return;
      const at = place(event.target);
      clearTimeout(leaving);
      if (at) R.store.hover(at);
      else leaving = setTimeout(() => R.store.hover(null), 120);
    });
    root.addEventListener("pointerleave", () => {
      clearTimeout(leaving);
      leaving = setTimeout(() => R.store.hover(null), 120);
    });
  };

  const TYPING = "input:not([type=range]):not([type=checkbox]):not([type=radio]), textarea, select, [contenteditable=true]";

  /** Arrow keys: on a token they move through tokens (up and down: steps), elsewhere in the run through steps. */
  const keys = (root, { accept } = {}) => {
    root.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
      if (event.target.matches(TYPING) || !R.store.state.rows.length) return;
      const onToken = Boolean(place(event.target));
      if (!onToken && event.target.matches("input[type=range], [data-own-keys] *")) return;
      const { store } = R;
      const filter = accept ? accept() : undefined;
      const actions = {
        ArrowRight: () => (onToken ? store.moveToken(1, filter) : store.moveStep(1)),
        ArrowLeft: () => (onToken ? store.moveToken(-1, filter) : store.moveStep(-1)),
        ArrowDown: () => onToken && store.moveStep(1, { focus: true }),
        ArrowUp: () => onToken && store.moveStep(-1, { focus: true }),
        Home: () => store.moveTo(0, { select: true, focus: onToken }),
        End: () => store.moveTo(store.last(), { select: true, focus: onToken }),
        " ": () => onToken && (store.state.playing ? store.stop() : store.play()),
      };
      const action = actions[event.key];
      if (!action || action() === false) return;
      event.preventDefault();
    });
  };

  R.marks = { chip, fillChip, flow, fillFlow, sample, listen, keys, place, key: (at) => `${at.step}.${at.token}` };
})();
