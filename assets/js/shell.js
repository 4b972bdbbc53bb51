/* Small things of the page around the views: downloads, addresses of the tabs, keys. */
(() => {
  const shell = (window.RedlineShell = window.RedlineShell || {});

  /** Save a text as a file; `payload` is JSON {name, type, text} that our own server sent. */
  shell.download = (payload) => {
    if (!payload) return;
    let file;
    try {
      file = JSON.parse(payload);
    } catch {
      return;
    }
    const url = URL.createObjectURL(new Blob([file.text], { type: `${file.type};charset=utf-8` }));
    const link = document.createElement("a");
    link.href = url;
    link.download = file.name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };

  /** Each tab has its address; the Playground's own (run, step, token) and Compare's (ids) are kept while one is away. */
  const kept = { playground: "", compare: "" };
  const shared = new URLSearchParams(location.search);
  const extra = (params) => {
    for (const [key, value] of shared) if (key.startsWith("__")) params.set(key, value);
    const text = params.toString().replaceAll("%2C", ",");
    return location.pathname + (text ? "?" + text : "");
  };
  const setAddress = (params) => history.replaceState(history.state, "", extra(params));
  let tab = shared.get("compare") ? "compare" : (!shared.get("run") && shared.get("tab")) || "playground";
  shell.shownTab = () => tab;

  /* Gradio 6.31.0 never stops the clock of its loading screen: the page draws 60 pictures a second for as long as it is
     open, which takes a quarter of a core from the engine. Nothing refers to that clock. But when each of several pictures
     makes two callbacks, one is ours and the other the clock's; the number before our next one is its own. */
  const stopClock = () => {
    if (window.gradio_config?.version !== "6.31.0") return;
    const end = performance.now() + 60000;
    let last = 0;
    let pairs = 0;
    const look = (now) => {
      const next = requestAnimationFrame(look);
      pairs = next - last === 2 ? pairs + 1 : 0;
      last = next;
      if (pairs >= 8) cancelAnimationFrame(next - 1);
      if (pairs >= 8 || now > end) cancelAnimationFrame(next);
    };
    requestAnimationFrame(look);
  };

  /* Which tab is on show is read from the page, never from Gradio's report of a choice: those come late and out of order
     while the page opens, when it also reports tabs that nobody chose. The address must survive until the server read it. */
  let opened = false;
  const shownPanel = () => {
    const panels = document.querySelectorAll("#rl-tabs > [role=tabpanel]");
    const panel = [...panels].find((each) => each.style.display !== "none");
    return panel ? panel.id.replace("rl-tab-", "") : null;
  };
  const look = () => {
    const id = shownPanel();
    if (id) tabSelected(id);
  };
  const watchPanels = () => {
    const tabs = document.getElementById("rl-tabs");
    if (!tabs) return;
    const watch = new MutationObserver((changes) => {
      if (changes.some((change) => change.type === "childList")) follow();
      look();
    });
    // A tab's panel is made when it is first shown.
    const follow = () => {
      watch.observe(tabs, { childList: true });
      for (const panel of tabs.querySelectorAll(":scope > [role=tabpanel]")) {
        watch.observe(panel, { attributes: true, attributeFilter: ["style"] });
      }
    };
    follow();
  };
  shell.opened = (id) => {
    if (id) tab = id;
    if (!opened) {
      stopClock();
      watchPanels();
    }
    opened = true;
    // What was chosen before this moment; Gradio may still be about to show the tab that the server named.
    setTimeout(look, 100);
  };
  shell.isOpen = () => opened;

  const tabSelected = (id) => {
    if (id === tab) return;
    if (tab in kept) kept[tab] = location.search;
    tab = id;
    if (id in kept && kept[id]) setAddress(new URLSearchParams(kept[id]));
    else setAddress(new URLSearchParams(id === "playground" ? {} : { tab: id }));
    if (id === "playground" && window.Redline && window.Redline.address) window.Redline.address.write();
  };

  /** `ids` are the stored runs of the comparison; without any, the address names the tab alone. */
  shell.compareAddress = (ids) => {
    const params = new URLSearchParams(ids ? { compare: ids } : { tab: "compare" });
    if (tab === "compare") setAddress(params);
    else kept.compare = "?" + params;
  };

  shell.keepRun = (id) => {
    if (window.Redline && window.Redline.address) window.Redline.address.keep(id);
  };

  /** Ctrl+Enter (or Cmd+Enter) in the prompt runs it. */
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    const inPrompt = event.target instanceof Element && event.target.closest("#rl-left");
    const run = document.querySelector("button#rl-run, #rl-run button");
    if (inPrompt && run && !run.disabled) {
      event.preventDefault();
      run.click();
    }
  });
})();
