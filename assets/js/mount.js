/* Puts views into the containers that Gradio renders, in whatever order page, scripts and values arrive. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.mount) return;

  /** Draw views into every unclaimed [data-rl] container inside `element`. */
  const mount = (element) => {
    const found = element.matches("[data-rl]") ? [element] : [...element.querySelectorAll("[data-rl]")];
    for (const root of found) {
      const view = R.views[root.dataset.rl];
      if (!view || root.dataset.rlDrawn) continue;
      root.dataset.rlDrawn = "1";
      const react = view(root);
      if (!react) continue;
      const end = R.store.subscribe((event, detail) => {
        // Gradio may throw a container away; its view goes with it.
        if (root.isConnected) react(event, detail);
        else if (event === "run") end();
      });
    }
  };
  R.mount = mount;
  const waiting = window.RedlineWaiting || [];
  window.RedlineWaiting = { push: (act) => act() };
  waiting.forEach((act) => act());
})();
