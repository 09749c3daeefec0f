"""The page of `sambasim report`: one HTML file that needs no network.

    facts       what is predicted for a PEF, before it has a form
    part        a part of the page: HTML, figures and data, all of it plain
    header, timeline, sections, pipeline, memory, scaling, operators, grounds
                one part each, of predicted numbers
    measured    the parts of a run's metrics, of measured numbers
    assemble    parts to a page; style.css and page.js are what it carries
    figure      the only file that knows plotly

A part is either predicted or measured, and says which; no figure and no table has both.
"""
