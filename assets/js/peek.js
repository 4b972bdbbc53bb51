/* On narrow screens the explanation lies below the fold: a strip at the lower edge says its sentence at once. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.peek) return;
  const { h, store } = R;
  const CLOSE = "M6.4 5 12 10.6 17.6 5 19 6.4 13.4 12 19 17.6 17.6 19 12 13.4 6.4 19 5 17.6 10.6 12 5 6.4z";

  /** Attach the strip to the explanation's card `root`; it hides while that card is in sight. */
  R.peek = (root) => {
    const words = h("div.rl-peek-words");
    let dismissed = null;
    let inSight = false;
    const more = h("button.rl-seg", {
      type: "button", text: "Show the numbers",
      onclick: () => root.scrollIntoView({ behavior: R.reducedMotion() ? "auto" : "smooth", block: "start" }),
    });
    const close = h("button.rl-icon-button", {
      type: "button", "aria-label": "Close the explanation", title: "Close",
      onclick: () => {
        dismissed = R.marks.key(store.state.selection);
        draw();
      },
    }, R.icon(CLOSE));
    const strip = h("div.rl-panel.rl-peek", { hidden: true }, words, h("div.rl-peek-tools", {}, more, close));
    document.body.append(strip);

    const draw = () => {
      const { selection, chosen } = store.state;
      const token = store.token(selection);
      if (!root.isConnected) strip.remove();
      strip.hidden = !token || !chosen || inSight || dismissed === R.marks.key(selection) || root.offsetParent === null;
      if (strip.hidden) return;
      words.replaceChildren(...R.why.sentence(store.state.rows[selection.step], token));
    };
    if (window.IntersectionObserver) {
      new IntersectionObserver((entries) => {
        inSight = entries[entries.length - 1].isIntersecting;
        draw();
      }, { rootMargin: "0px 0px -25% 0px" }).observe(root);
    }
    store.subscribe((event) => {
      if (["run", "selection", "chosen", "end"].includes(event)) draw();
    });
  };
})();
