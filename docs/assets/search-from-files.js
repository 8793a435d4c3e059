// Browsers start no worker for a page that is opened from a file, so its search would be silent. There, the same script runs in a
// hidden frame, which hears and answers as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const script = (source) => new Promise((resolve) => {
        const element = inside.document.createElement("script");
        element.src = source;
        element.onload = resolve;
        inside.document.body.append(element);
      });
      inside.importScripts = (...sources) => sources.reduce((done, source) => done.then(() => script(source)), Promise.resolve());
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.ready = script(new URL(url, location.href).href);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
