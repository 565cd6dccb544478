// What scrolls can be reached by the keyboard, and says that it scrolls; what fits is no stop on the way.
(function () {
  const scrolls = (each) => /auto|scroll/.test(getComputedStyle(each).overflowX) && each.scrollWidth > each.clientWidth;
  function mark() {
    document.querySelectorAll("main pre, main .tex, main .scroll, main .output, main .cell_output, main .plans, main .katex-display, main .pst-scrollable-table-container")
      .forEach((each) => {
        if (scrolls(each) && !each.hasAttribute("tabindex")) {
          each.tabIndex = 0;
          each.dataset.scrolls = "yes";
        } else if (each.dataset.scrolls && !scrolls(each)) {
          each.removeAttribute("tabindex");
          delete each.dataset.scrolls;
        }
      });
  }
  addEventListener("load", () => document.fonts.ready.then(mark));  // formulas have their width then
  addEventListener("resize", mark);
  document.addEventListener("toggle", mark, true);  // a fold that opens has a width only then
})();
