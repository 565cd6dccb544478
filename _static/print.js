// A page that is printed shows its folds open; on the screen they are as the reader left them.
(function () {
  const folds = () => document.querySelectorAll("details");
  window.addEventListener("beforeprint", () => folds().forEach((fold) => {
    if (!fold.open) { fold.open = true; fold.dataset.printed = "yes"; }
  }));
  window.addEventListener("afterprint", () => folds().forEach((fold) => {
    if (fold.dataset.printed) { fold.open = false; delete fold.dataset.printed; }
  }));
})();
