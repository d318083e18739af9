// The planner inside a page of the site. It is some 12 MB, so it loads when somebody asks.
for (const form of document.querySelectorAll("form.live")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const frame = form.parentElement.querySelector("iframe") ?? document.createElement("iframe");
    frame.title = "Planner";
    frame.className = "live";
    frame.src = `${form.action}#${new URLSearchParams(new FormData(form))}`;
    form.after(frame);
  });
}
